"""The toy model's tokenizer: one token per character, and one for each of the two words a response uses."""

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from dapo.quickstart.corpus import AGAIN, ANSWER

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
WORDS = (ANSWER, AGAIN)
CHARACTERS = ("\n", *map(chr, range(32, 127)))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII and line breaks survive a round trip; any other character becomes `<unk>`.

    Nothing is added to a text: the model reads a question without a start token, and the sampler stops at `<eos>`.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("|".join((*WORDS, r"[\s\S]"))), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        padding_side="left",
    )
