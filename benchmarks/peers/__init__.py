"""Tandem beside the engines that people would pick instead, in one session: `python -m peers --help`.

    install/      peers into environments of their own, from package registries
    checkpoints   the same random weights for all, and llama.cpp's copy of them
    jobs          prompts and forced output lengths, a function of a seed
    workloads     what is timed and which figures come of it
    arrivals, interference   the same of servers, over time
    sides/        what runs inside a peer's environment, spoken to in lines (`lines`)
    engines/      one file each: how a peer is started and asked
    stages        what a run consists of; `session` runs them, each with its share of the minutes (`time_limit`)
    rounds        A B A B …, on a machine that is watched (`machine`), by processes that end with it (`processes`)
    limits        what the machine can do at most
    targets       ratios against what they should be
    report        tables, a plot and JSON; `docs` puts them into docs/benchmarks.md

Nothing here is imported by Tandem, and `sides` and `lines` import nothing that a peer's environment may lack.
"""
