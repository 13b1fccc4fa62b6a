"""Newton-Schulz and the two elementwise halves of a Muon step, behind one interface per idea.

The public names are listed here. ``compile_muon.kernels.dispatch`` alone chooses the arithmetic of ``newton_schulz``.
"""

# With a checkout's root on sys.path this folder also answers to ``kernels``, a package that transformers imports to
# learn its version. Under that name it is empty: a second copy of the operators would unregister the first.
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
