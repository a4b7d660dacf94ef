"""Which plots a report has."""

from report.made import read, training, write_complete, write_log

from lmtrain.report.plots import choose_plots


def test_one_run_has_a_plot_per_chart_with_its_restarts(tmp_path):
    write_complete(tmp_path)
    plots, left_out = choose_plots([read(tmp_path)])
    named = {plot.name: [line.label for line in plot.lines] for plot in plots}
    assert named == {
        "loss": ["train/loss"],
        "eval-loss": ["eval/loss", "eval/books/loss", "eval/code/loss"],
        "eval-bpb": ["eval/bpb"],
        "learning-rate": ["train/learning_rate"],
        "gradient-norm": ["train/gradient_norm"],
        "throughput": ["throughput/tokens_per_second"],
        "step-time": ["throughput/duration"],
    }
    assert all(plot.restarts == [(20, None)] and plot.last_step == 40 for plot in plots)
    assert left_out == []


def test_several_runs_share_a_plot_per_metric_and_keep_their_colours(tmp_path):
    write_complete(tmp_path, "a")
    write_log(tmp_path, "b", training(60, sets=("wiki",)))
    plots = {plot.name: plot for plot in choose_plots([read(tmp_path, "a"), read(tmp_path, "b")])[0]}
    assert [(line.label, line.number, line.run) for line in plots["loss"].lines] == [("a", 0, 0), ("b", 1, 1)]
    assert [(line.label, line.number) for line in plots["eval-loss-eval-wiki-loss"].lines] == [("b", 1)]
    assert plots["eval-loss-eval-wiki-loss"].restarts == []
    assert plots["loss"].restarts == [(20, 0)]
    assert plots["loss"].last_step == 60


def test_file_names_are_plain_and_distinct_for_any_name_of_a_data_set(tmp_path):
    lines = [{"step": 1, "eval/../../etc/loss": 1.0, "eval/.. /../etc/loss": 1.0, "eval/é/loss": 1.0}]
    for run in ("a", "b"):
        write_log(tmp_path, run, lines)
    names = [plot.name for plot in choose_plots([read(tmp_path, "a"), read(tmp_path, "b")])[0]]
    assert sorted(names) == ["eval-loss-eval-etc-loss", "eval-loss-eval-etc-loss-2", "eval-loss-eval-loss"]


def test_metrics_beyond_the_limit_of_a_plot_are_noted(tmp_path):
    sets = {f"eval/{number}/loss": 1.0 for number in range(30)}
    write_log(tmp_path, "one", [{"step": 1, "eval/loss": 1.0, **sets}])
    plots, left_out = choose_plots([read(tmp_path)])
    assert len(plots[0].lines) == 16
    assert plots[0].lines[0].label == "eval/loss"
    assert left_out == ["Evaluation loss: 15 more metrics in the log, not plotted."]
