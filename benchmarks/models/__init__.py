"""The lab's models, each at three sizes.

`paper` is the size of the published systems, for the arithmetic of bytes; it is made on the meta device alone. `lab`
keeps the paper's share of table bytes at a size that 8 ranks of one machine can train in under a second per step, with
half the layers of Transformer and BERT, for every rank traces them anew; `tiny` is for tests. The
recommender's `paper` is the Criteo Kaggle model of the DLRM benchmark, the other four are the models of EmbRace.
"""

from __future__ import annotations

from benchmarks.models.base import Workload
from benchmarks.models.bert import BertWorkload
from benchmarks.models.gnmt import GnmtWorkload
from benchmarks.models.language_model import LanguageModelWorkload
from benchmarks.models.recommender import CRITEO_ROWS, RecommenderWorkload
from benchmarks.models.transformer import TransformerWorkload

LAB_ROWS = 8_000
"""What a recommender's table has at most in the lab."""

MODELS: dict[str, dict[str, Workload]] = {
    "lm": {
        "paper": LanguageModelWorkload(793_470, 512, 2048, 2, batch_size=128, length=20, sampled=8192),
        "lab": LanguageModelWorkload(22_000, 128, 136, 2, batch_size=32, length=20, sampled=2048),
        "tiny": LanguageModelWorkload(300, 16, 24, 2, batch_size=4, length=6, sampled=16),
    },
    "gnmt": {
        "paper": GnmtWorkload(32_320, 1024, batch_size=128, length=25),
        "lab": GnmtWorkload(3_030, 96, batch_size=32, length=20),
        "tiny": GnmtWorkload(300, 16, batch_size=2, length=5),
    },
    "transformer": {
        "paper": TransformerWorkload(33_712, 1024, 16, 4096, 6, batch_size=200, length=25),
        "lab": TransformerWorkload(2_120, 128, 4, 512, 3, batch_size=32, length=20),
        "tiny": TransformerWorkload(300, 16, 2, 32, 2, batch_size=2, length=5),
    },
    "bert": {
        "paper": BertWorkload(30_522, 768, 12, 12, 512, batch_size=32, length=384),
        "lab": BertWorkload(2_660, 128, 4, 6, 512, batch_size=6, length=64),
        "tiny": BertWorkload(300, 16, 2, 2, 32, batch_size=2, length=12),
    },
    "recommender": {
        "paper": RecommenderWorkload(CRITEO_ROWS, 16, (512, 256, 64), (512, 256), batch_size=2048),
        "lab": RecommenderWorkload(
            tuple(min(rows, LAB_ROWS) for rows in CRITEO_ROWS), 32, (512, 256), (512, 256), batch_size=1024
        ),
        "tiny": RecommenderWorkload((300, 40, 3, 100), 16, (8,), (8,), batch_size=8),
    },
}
"""Model -> size -> workload."""
