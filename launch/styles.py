"""How each old-logprob source looks, the same in every figure, in colours that all eyes tell apart (Okabe and Ito)."""

STYLES = {
    "snapshot": {"color": "#0072B2", "marker": "o"},
    "dedicated": {"color": "#999999", "marker": "P"},
    "interrupt": {"color": "#000000", "marker": "*"},
    "ewma": {"color": "#CC79A7", "marker": "s"},
    "interpolate": {"color": "#E69F00", "marker": "D"},
    "lagged": {"color": "#56B4E9", "marker": "^"},
    "recompute": {"color": "#D55E00", "marker": "v"},
    "sampler": {"color": "#009E73", "marker": "X"},
}
"""Arguments of matplotlib's `plot`, by the source's name."""
