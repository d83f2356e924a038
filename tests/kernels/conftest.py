from __future__ import annotations

import pytest
import torch

# The arrays are small: more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(params=("interpreted", pytest.param("gpu", marks=pytest.mark.gpu)))
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: the same checks run interpreted or, with `-m gpu`, on a GPU. A process does one of the two."""
    pytest.importorskip("triton", minversion="3.7")
    from qconvert.kernels.triton.chips import interpreted

    if request.param == "interpreted":
        if not interpreted():
            pytest.skip("this process compiles kernels; TRITON_INTERPRET=1 interprets them")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if interpreted():
        pytest.skip("TRITON_INTERPRET is set: this process interprets kernels")
    return torch.device("cuda")
