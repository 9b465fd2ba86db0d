"""Console scripts. This module imports nothing, so that Ctrl-C while a command is loaded ends without a traceback."""


def tandem() -> int:
    """`tandem`; returns the exit status, 130 after Ctrl-C."""
    try:
        from tandem_services.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


def kubectl_tandem() -> int:
    """`kubectl-tandem`; returns the exit status, 130 after Ctrl-C."""
    try:
        from tandem_services.cli.k8s.command import main

        return main()
    except KeyboardInterrupt:
        return 130
