"""How costs are found to grow, and how that is reported."""

import importlib

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

AXIS = [2.0**power for power in range(8)]


@pytest.fixture(scope="module")
def growth():
    with benchmarks_importable():
        yield importlib.import_module("growth_fit")


@pytest.fixture(scope="module")
def line_plot():
    with benchmarks_importable():
        yield importlib.import_module("line_plot")


@pytest.mark.parametrize(
    ("cost", "power", "superlinear"),
    [
        (lambda _: 5.0, 0.0, False),
        (lambda x: 3 * x, 1.0, False),
        (lambda x: x**0.5, 0.5, False),
        (lambda x: 0.1 * x**2, 2.0, True),
    ],
    ids=["constant", "linear", "root", "square"],
)
def test_power_of_a_cost_is_found(growth, cost, power, superlinear):
    curve = growth.Curve(points={x: cost(x) for x in AXIS}, unit="ms")
    assert (curve.power, curve.superlinear) == (pytest.approx(power, abs=0.01), superlinear)


def test_constant_cost_has_little_weight_at_the_axis_end(growth):
    curve = growth.Curve(points={x: 10 + x**2 for x in AXIS}, unit="ms")
    assert curve.power > 1.5


def test_terms_are_those_of_the_parabola_and_never_negative(growth):
    parabola = growth.Curve(points={x: 4 + 2 * x + 0.5 * x**2 for x in AXIS}, unit="ms")
    assert parabola.terms == pytest.approx([4, 2, 0.5], rel=1e-3)
    bent = growth.Curve(points={x: 100 * x**0.3 for x in AXIS}, unit="ms")
    assert min(bent.terms) >= 0


def test_growth_reason_is_reported_only_if_superlinear(growth):
    square = {x: x**2 for x in AXIS}
    assert growth.Curve(points=square, unit="ms", reason="because").as_json()["reason"] == "because"
    assert "reason" not in growth.Curve(points=square, unit="ms").as_json()
    assert "reason" not in growth.Curve(points={x: x for x in AXIS}, unit="ms", reason="because").as_json()


def test_two_points_are_a_line(growth):
    assert growth.Curve(points={1.0: 1.0, 2.0: 4.0}, unit="ms").power == 2.0


@pytest.mark.parametrize("logarithmic", [False, True])
def test_plot_has_every_point_inside_its_axes(line_plot, tmp_path, logarithmic):
    series = {"measured": {1e4: 0.7, 1e6: 70.0, 1e7: 700.0}}
    path = tmp_path / "plot.svg"
    line_plot.draw(path, series, title="a & b", x_label="blocks", y_label="MiB", logarithmic=logarithmic)
    text = path.read_text()
    assert "a &amp; b" in text
    places = [line.split('"') for line in text.splitlines() if line.startswith("<circle")]
    assert len(places) == 3
    for _, x, _, y, *_ in places:
        assert line_plot.LEFT <= float(x) <= line_plot.WIDTH - line_plot.RIGHT
        assert line_plot.TOP <= float(y) <= line_plot.HEIGHT - line_plot.BOTTOM


def test_equal_distances_are_equal_factors_on_logarithmic_axes(line_plot, tmp_path):
    path = tmp_path / "plot.svg"
    line_plot.draw(path, {"m": {1: 1, 10: 10, 100: 100}}, title="", x_label="", y_label="", logarithmic=True)
    xs = [float(line.split('"')[1]) for line in path.read_text().splitlines() if line.startswith("<circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


@pytest.mark.parametrize(("power", "unexplained"), [(1.0, False), (2.0, False), (2.5, True)])
def test_reason_explains_its_power_and_no_more(growth, power, unexplained):
    curve = growth.Curve(points={x: x**power for x in AXIS}, unit="ms", reason="because", reason_power=2.0)
    assert curve.unexplained is unexplained
    assert growth.Curve(points=curve.points, unit="ms").unexplained is (power > 1.0)


def test_table_has_the_costs_of_all_parts_that_were_measured(growth):
    with benchmarks_importable():
        cost_growth = importlib.import_module("cost_growth")
    line = growth.Curve(points={x: 1000 * x for x in AXIS}, unit="µs")
    square = growth.Curve(points={x: x**2 for x in AXIS}, unit="ms")
    earlier, now = (
        {"costs": {name: curve.as_json()}, "left_out": {}, "superlinear_without_reason": faults}
        for name, curve, faults in (("square", square, ["square"]), ("line", line, []))
    )
    whole = cost_growth.with_earlier(earlier, now)
    assert whole["superlinear_without_reason"] == ["square"]
    assert cost_growth.table_of(whole["costs"]).splitlines()[2:] == [
        "| square | ms | 1 at 1 | 256 at 16 | 16,380 at 128 | 2 | 1.15 |",
        "| line | µs | 1,000 at 1 | 16,000 at 16 | 128,000 at 128 | 1 | 1.15 |",
    ]
    again = {"costs": {"square": line.as_json()}, "left_out": {}, "superlinear_without_reason": []}
    assert cost_growth.with_earlier(whole, again)["superlinear_without_reason"] == []
