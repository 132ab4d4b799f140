from octavo.hf.fused_groups import groups

NAMES = (*(f"self_attn.{leaf}_proj" for leaf in "qkvo"), *(f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")))


def test_groups() -> None:
    assert groups([f"a.{name}" for name in NAMES]) == [
        tuple(f"a.self_attn.{p}_proj" for p in "qkv"),
        ("a.self_attn.o_proj",),
        ("a.mlp.gate_proj", "a.mlp.up_proj"),
        ("a.mlp.down_proj",),
    ]
    assert groups(["0.q_proj", "1.q_proj", "0.k_proj"]) == [("0.q_proj", "0.k_proj"), ("1.q_proj",)]
    assert groups(["a.value", "a.output", "a.key"]) == [("a.value", "a.key"), ("a.output",)]
