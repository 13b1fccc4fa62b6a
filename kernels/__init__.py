"""Newton-Schulz and the two elementwise halves of a Muon step, behind one interface per idea.

Everything above this package calls only what is listed here. The arithmetic behind ``newton_schulz`` is chosen in one
place, ``compile_muon.kernels.dispatch``.
"""

# With a checkout's root on sys.path this folder also answers to ``kernels``, a package that transformers looks for and
# imports to learn its version. It finds an empty one: a second copy of the operators would unregister the first.
if __name__ == "compile_muon.kernels":
    from .apply import average, muon_apply
    from .coefficients import COEFFICIENTS, CoefficientSet, resolve_coefficients
    from .dispatch import check_backend, resolve_dtype
    from .momentum import Averages, muon_momentum
    from .newton_schulz import newton_schulz, newton_schulz_list

    __all__ = [
        "COEFFICIENTS",
        "Averages",
        "CoefficientSet",
        "average",
        "check_backend",
        "muon_apply",
        "muon_momentum",
        "newton_schulz",
        "newton_schulz_list",
        "resolve_coefficients",
        "resolve_dtype",
    ]
