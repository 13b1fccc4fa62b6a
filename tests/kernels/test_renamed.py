"""Names of the last release: each gives what the new one gives, and says its name."""

import pytest
import torch

from compile_muon import kernels, passes


def test_former_names_warn_and_work() -> None:
    with pytest.warns(FutureWarning, match=r"passes\.Half is now called compile_muon\.passes\.GraphKind"):
        assert passes.Half is passes.GraphKind
    with pytest.warns(FutureWarning, match="LOWERING_PASSES"):
        assert passes.HALF_PASSES is passes.LOWERING_PASSES
    with pytest.warns(FutureWarning, match="kinds=") as found:
        made = passes.GraphPass("one", lambda gm, ctx: gm, halves=(passes.GraphKind.JOINT,))
    assert made.kinds == (passes.GraphKind.JOINT,) and found[0].filename == __file__
    with pytest.warns(FutureWarning, match=r"PassContext\.kind"):
        assert passes.PassContext(passes.GraphKind.STEP).half is passes.GraphKind.STEP
    weight = torch.ones(2, 2)
    with pytest.warns(FutureWarning, match="found_inf"):
        kernels.muon_apply([weight], [weight], lr=1.0, weight_decay=0.0, scale=1.0, withheld=torch.ones(()))
    assert weight.eq(1).all()
    with pytest.raises(AttributeError, match="has no attribute 'Quarter'"):
        passes.Quarter  # noqa: B018
