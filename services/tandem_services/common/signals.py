"""The signals that ask a process to finish what it does and to end."""

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored: what `nohup` starts is to outlive its terminal."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)
