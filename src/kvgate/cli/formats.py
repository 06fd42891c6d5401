"""Names of the rollout formats, apart from what makes them, so that the command line need not load it."""

FORMATS = ("argo", "flagger", "flagd", "prometheus", "grafana")
