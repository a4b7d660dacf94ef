"""The plot of a learning rate is a file in the format of its name."""

import matplotlib.image

from lmtrain.optim.config import AdamConfig
from lmtrain.optim.schedules import plot_learning_rate


def test_the_rate_is_drawn_over_all_steps(tmp_path):
    plot_learning_rate(AdamConfig(), 20_000, str(tmp_path / "rate.png"))
    picture = matplotlib.image.imread(tmp_path / "rate.png")[..., :3]
    assert picture.shape[:2] == (400, 800)
    assert (picture.max(-1) - picture.min(-1) > 0.3).sum() > 500  # a coloured curve
