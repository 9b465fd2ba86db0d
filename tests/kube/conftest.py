"""Fixtures of the tests against a real control plane. They all live in this folder: one cluster serves them.

Operators of these tests authenticate as the chart's ServiceAccount with the chart's rights (`operator_kubeconfig`),
never as the administrator: `control_plane.kubeconfig` is for what people do.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tandem_testing.control_plane import ABOUT, NOT_RUN, ControlPlane, control_plane, namespace
from tandem_testing.kube_services import Services
from tandem_testing.operator_account import OperatorAccount
from tandem_testing.operator_process import OperatorProcess, operator
from tandem_testing.skip_lines import at_one_place

__all__ = ["control_plane", "namespace"]


@pytest.fixture(scope="session")
def operator_account(control_plane: ControlPlane) -> OperatorAccount:
    """The account of the chart, in a namespace of its own; without rights anywhere yet."""
    made = control_plane.api.post("/api/v1/namespaces", json={"metadata": {"generateName": "operators-"}})
    return OperatorAccount(control_plane, made.raise_for_status().json()["metadata"]["name"])


@pytest.fixture
def operator_kubeconfig(operator_account: OperatorAccount, namespace: str, tmp_path: Path) -> Path:
    """Of the account, which has the chart's rights in the namespace of the test and nowhere else."""
    operator_account.admit(namespace)
    return operator_account.kubeconfig(tmp_path / "operator-kubeconfig")


@pytest.fixture
def services(control_plane: ControlPlane, namespace: str) -> Services:
    """Those of the namespace of the test."""
    return Services(control_plane, namespace)


@pytest.fixture
def running(operator_kubeconfig: Path, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator of that namespace."""
    flags = ("--namespaces", namespace, "--no-leader-elect")
    with operator(operator_kubeconfig, tmp_path / "operator.log", *flags) as one:
        yield one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests that are skipped for want of a cluster are skipped at one place: the report has one line for all."""
    return at_one_place((yield), NOT_RUN, __file__)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the tests ran against."""
    about = config.stash.get(ABOUT, None)
    if about is not None:
        terminalreporter.write_line(about)
