"""A driver: `ray_driver.py N FOLDER PLANS` does the toy runs of `ranks.py` on N ranks of the cluster that is there."""

import sys
from pathlib import Path

from dapo.config.schema import ClusterConfig
from dapo.distributed.ray_workers import supervise

if __name__ == "__main__":
    n, folder, plans = sys.argv[1:]
    ranks = str(Path(__file__).with_name("ranks.py"))
    cluster = ClusterConfig(backend="ray", gpus=int(n))
    supervise(cluster, lambda: [ranks, folder, plans], Path(folder) / "ray", on_gpus=False)
