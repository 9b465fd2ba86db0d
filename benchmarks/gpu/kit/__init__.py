"""What a GPU machine without a package registry lacks, in one folder of a few MB.

    tools/gpu_pack.sh [FOLDER]              here: wheels, a slim NIXL, kernels, a manifest into FOLDER (default kit/)
    tools/gpu_unpack.sh [FOLDER] [SITE]     there: unpacks them into SITE and prints the PYTHONPATH

pins.py      packages and the Python they are for
wheels.py    wheels of exactly these versions, by pip
nixl.py      of NIXL's wheel the UCX backend, and every library that it needs
kernels.py   what Triton compiles for a run, compiled here
manifest.py  what a kit holds, with sizes and digests
pack.py, unpack.py     the two commands
"""
