"""The paged engine on a GPU: CUDA graphs and kernels write what the model says, in bf16."""

import numpy as np
import pytest
import torch

from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.types import Completion, StopReason

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

VOCABULARY = 5000


def policy(family: str = "qwen2", vocabulary: int = VOCABULARY) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=384, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, vocab_size=vocabulary, max_position_embeddings=2048, eos_token_id=0,
        bos_token_id=1, pad_token_id=0, initializer_range=0.06,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
    return Policy(model, None).eval()


def requests(n: int, new: int = 60, vocabulary: int = VOCABULARY) -> list[Request]:
    wanted = []
    for i in range(n):
        prompt = np.random.default_rng(i // 4).integers(3, vocabulary, 5 + 37 * (i // 4 % 5)).tolist()
        wanted.append(Request(i, tuple(prompt), NoiseKey(0, "train", str(i // 4), 0, i), new, group=i // 4))
    return wanted


def engine(model: Policy, **changes: object) -> LocalEngine:
    sizes = {"sampling": SamplingParams(), "max_concurrent": 40, "max_tokens": 512}
    return LocalEngine(model, **{**sizes, **changes})


def drain(local: LocalEngine) -> list[Finished]:
    finished: list[Finished] = []
    while local.n_in_flight or local.n_waiting:
        finished += local.advance()
    return finished


def gap(model: Policy, finished: list[Finished]) -> np.ndarray:
    with torch.no_grad():
        packed = pack([r.prompt for r, _ in finished], [c.tokens for _, c in finished], model.device)
        theirs = model(packed, temperature=1.0)[0].float().cpu().numpy()
    return np.abs(theirs - np.concatenate([c.logp for _, c in finished]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_log_probs_are_those_of_the_training_forward(family: str):
    model = policy(family)
    local = engine(model)
    assert local._decoder.has_graphs
    local.submit(requests(60))
    finished = drain(local)
    assert len(finished) == 60
    difference = gap(model, finished)
    assert difference.mean() < 0.02
    assert difference.max() < 0.5


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_log_probs_of_drafts_are_those_of_the_training_forward(family: str):
    """Greedy responses of few different tokens go in circles, so that many guesses are right."""
    model = policy(family, vocabulary=30)
    local = engine(model, sampling=SamplingParams(temperature=0.0), drafting=Drafting(tokens=4, below_rows=8))
    local.submit(requests(8, new=100, vocabulary=30))
    finished = drain(local)
    assert len(finished) == 8
    difference = gap(model, finished)
    assert difference.mean() < 0.02
    assert difference.max() < 0.5
    assert any(has_drafts for *_, has_drafts in local._decoder.graphs)
    n_drafted, n_accepted = local.take_drafted()
    assert 10 < n_accepted <= n_drafted
    assert local._pool.n_free == local._pool.n_pages


def by_id(finished: list[Finished]) -> dict[int, Completion]:
    return {request.id: completion for request, completion in finished}


def test_out_of_pages_everything_is_finished_and_nothing_is_lost():
    model = policy()
    tight = engine(model, kv_tokens=3_000)
    tight.submit(requests(60, new=200))
    done = by_id(drain(tight))
    assert sorted(done) == list(range(60))
    assert tight._pool.n_free == tight._pool.n_pages
    assert gap(model, [(r, done[r.id]) for r in requests(60, new=200)]).mean() < 0.02


def test_the_same_schedule_gives_the_same_bits():
    results = []
    for _ in range(2):
        local = engine(policy())
        local.submit(requests(30))
        results.append(by_id(drain(local)))
    for i, completion in results[0].items():
        assert completion.tokens.tolist() == results[1][i].tokens.tolist()
        assert completion.logp.tobytes() == results[1][i].logp.tobytes()


def test_weights_updated_in_place_are_what_graphs_read():
    model = policy()
    local = engine(model)
    local.submit(requests(20))
    early = [item for _ in range(2) for item in local.advance()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    local.load_weights(model, 1)
    finished = early + drain(local)
    with torch.no_grad():
        packed = pack([r.prompt for r, _ in finished], [c.tokens for _, c in finished], model.device)
        theirs = model(packed, temperature=1.0)[0].float().cpu().numpy()
    version = np.concatenate([c.version for _, c in finished])
    difference = np.abs(theirs - np.concatenate([c.logp for _, c in finished]))
    assert difference[version == 1].mean() < 0.02
    assert difference[version == 0].mean() > 0.05, "the update was too small to prove anything"


def test_top_p_on_the_device_stays_in_the_nucleus():
    model = policy()
    local = engine(model, sampling=SamplingParams(top_p=0.5))
    local.submit(requests(16, new=40))
    finished = drain(local)
    with torch.no_grad():
        for request, completion in finished:
            ids = torch.tensor([[*request.prompt, *completion.tokens.tolist()]], device="cuda")
            probability = model.model(ids).logits[0, len(request.prompt) - 1 : -1].float().softmax(-1)
            chosen = probability.gather(-1, torch.tensor(completion.tokens, device="cuda").long()[:, None])
            above = (probability > chosen * 1.1).float().mul(probability).sum(-1)
            assert (above < 0.55).all()


def test_nan_logits_abort_that_response_and_no_other():
    model = policy()
    with torch.no_grad():
        model.backbone.embed_tokens.weight[77] = float("nan")
    local = engine(model)
    good = requests(8, new=20)
    bad = Request(99, (5, 77, 6), NoiseKey(0, "train", "bad", 0, 0), 20, group=99)
    local.submit([bad, *good])
    done = by_id(drain(local))
    assert done[99].stop_reason is StopReason.ABORTED
    assert [fault.request.id for fault in local.faults if fault.request.id == 99] == [99]
    assert sum(done[i].stop_reason is not StopReason.ABORTED for i in range(8)) >= 7
