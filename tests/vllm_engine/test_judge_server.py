"""A judge behind vLLM's own server: started here, asked by the verifier, held to the rubric's form by its grammar."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dapo.rewards import Task, VerifierPool

PATIENCE_S = 1800.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
RUBRIC = """
url = "http://127.0.0.1:{port}/v1"
model = "judge"
json_schema = {schema}
max_tokens = 64

[criteria.right]
question = "Is it right?"

[criteria.clear]
question = "Is it clear?"
"""


def random_reader(folder: Path) -> None:
    """A random model of two layers that reads bytes: what it says of itself is noise."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *letters])}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that answers; it is ended with the tests."""
    folder = tmp_path_factory.mktemp("judge-model")
    random_reader(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    log = (folder / "server.log").open("w")
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(number), "--max-model-len", "4096",
        "--dtype", "float32", "--enforce-eager",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',  # or blanks
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not is_up(number):
            assert server.poll() is None, (folder / "server.log").read_text()[-4_000:]
            assert time.monotonic() < deadline, (folder / "server.log").read_text()[-4_000:]
            time.sleep(0.5)
        yield number
    finally:
        server.terminate()
        server.wait(60)
        log.close()


def is_up(number: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{number}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def judged(folder: Path, port: int, *, schema: bool) -> tuple[list[str], list[str], str]:
    path = folder / "rubric.toml"
    path.write_text(RUBRIC.format(port=port, schema=str(schema).lower()))
    tasks = [Task(f"it is {i}", "42", None, {"question": "6 x 7?"}) for i in range(6)]
    with VerifierPool(f"judge:{path}", folder=folder / "judge") as pool:
        found = pool.judge_all(tasks)
        return [one.verdict.value for one in found], [one.message for one in found], pool.spent()


def test_a_grammar_makes_even_noise_a_verdict_and_the_second_pass_asks_nothing(port: int, tmp_path: Path):
    verdicts, said, spent = judged(tmp_path, port, schema=True)
    assert set(verdicts) <= {"CORRECT", "WRONG"}, said
    assert all(message.startswith("right ") and ", clear " in message for message in said)
    assert "6 verdicts asked for" in spent
    again, said_again, spent = judged(tmp_path, port, schema=True)
    assert (again, said_again) == (verdicts, said)
    assert "0 verdicts asked for, 6 from the cache" in spent


def test_noise_without_a_grammar_is_a_fault_with_its_name_and_no_grade(port: int, tmp_path: Path):
    verdicts, said, _ = judged(tmp_path, port, schema=False)
    assert set(verdicts) == {"CRASH"}
    assert all("could not be read 3 times" in message for message in said)
