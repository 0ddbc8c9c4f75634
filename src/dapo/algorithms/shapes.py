"""What the letters mean, and one check that tensors agree on them.

P problems in a step · G completions per problem · B rows (P·G, or a slice of them) · T tokens, prompt excluded ·
N the tokens of some rows end to end · V vocabulary · K parts of the reward.
"""

from torch import Tensor


def check_shapes(letters: str, *tensors: Tensor) -> None:
    """All `tensors` have one dimension per letter and the same sizes: check_shapes("N", logp, logp_old)."""
    names = letters.split()
    sizes = tensors[0].shape
    for tensor in tensors:
        if tensor.ndim != len(names):
            raise ValueError(f"expected a tensor of shape [{', '.join(names)}], got {list(tensor.shape)}")
        if tensor.shape != sizes:
            raise ValueError(f"tensors of shape [{', '.join(names)}] disagree: {list(sizes)} and {list(tensor.shape)}")
