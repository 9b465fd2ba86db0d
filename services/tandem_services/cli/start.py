"""Console scripts. Imports are in the functions, so that Ctrl-C while a command is loaded ends without a traceback."""


def tandem() -> int:
    """`tandem`; returns the exit status, 130 after Ctrl-C."""
    try:
        import sys

        if sys.argv[1:] == ["--version"]:
            # Before the other commands are loaded, which takes a hundred times as long.
            from tandem_services.cli.version import print_version

            return print_version()
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
