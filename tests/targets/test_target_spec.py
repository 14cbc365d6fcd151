import pytest

from draftlab.targets.spec import name_with_quantisation


@pytest.mark.parametrize(
    ("name", "quantisation", "expected"),
    [
        ("a/b", "none", "a/b"),
        ("a/b", "", "a/b"),
        ("x", "GGUF, dequantised", "x (GGUF, dequantised)"),
        ("x (Q4_1, dequantised)", "Q4_1, dequantised", "x (Q4_1, dequantised)"),
    ],
)
def test_a_targets_quantisation_is_said_once(name, quantisation, expected):
    assert name_with_quantisation(name, quantisation) == expected
