"""Names of the files in a results folder."""

MANIFEST = "run.json"
SAMPLES = "samples.jsonl"
CHECKS = "checks.json"
STOP = "stop.json"
SEAL = "seal.json"
LEADERBOARD = "leaderboard.json"
LOCK = ".lock"
