"""Static facts: the string that markers carry."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec

DTYPES = ("float32", "bfloat16", "float16", "float64")

muon_specs = st.builds(
    MuonSpec,
    batch=st.integers(1, 4),
    rows=st.integers(1, 64),
    cols=st.integers(1, 64),
    nesterov=st.booleans(),
    method=st.sampled_from(["standard", "gram"]),
    coefficients=st.lists(st.floats(-30, 30), min_size=1, max_size=4).map(lambda x: tuple(x * 3)),
    safety=st.floats(1.0, 2.0),
    restarts=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    eps=st.floats(1e-12, 1e-3),
    exchange=st.sampled_from(["local", "owner"]),
)


def axes(name):
    return st.builds(Axis, st.just(name), size=st.integers(1, 9), index=st.integers(0, 8), group=st.text(max_size=8))


@st.composite
def param_specs(draw):
    return ParamSpec(
        Layout(
            tuple(draw(st.lists(st.integers(1, 40), max_size=4))),
            stage=draw(st.integers(0, 3)),
            shard=draw(axes("shard")),
            replicate=draw(axes("replicate")),
            both=draw(st.none() | axes("all")),
            state_over_all=draw(st.booleans()),
            expert=draw(axes("expert")),
            tensor=draw(axes("tensor")),
            tensor_dim=draw(st.none() | st.integers(0, 3)),
            owner_group_over=draw(st.none() | axes("meeting")),
            replica_group_over=draw(st.none() | axes("copying")),
            averaged=draw(st.none() | st.integers(1, 9)),
        ),
        dtype=draw(st.sampled_from(DTYPES)),
        compute_dtype=draw(st.sampled_from(DTYPES)),
        reduce_dtype=draw(st.sampled_from(DTYPES)),
        muon=draw(st.none() | muon_specs),
    )


@settings(max_examples=30)
@given(param_specs())
def test_decode_inverts_encode(spec):
    text = spec.encode()
    assert ParamSpec.decode(text) == spec
    assert isinstance(ParamSpec.decode(text).layout.unsharded_shape, tuple)
    assert hash(ParamSpec.decode(text)) == hash(spec)
    json.loads(text)  # one readable line in a dumped graph
    assert "\n" not in text
