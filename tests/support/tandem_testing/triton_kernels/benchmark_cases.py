"""What `benchmarks/gpu` measures runs, kernels and peers alike, and peers of attention compute the same."""

import torch

from tandem_testing.benchmark_modules import benchmarks_importable

with benchmarks_importable():
    from gpu.attention_cases import AttentionCases
    from gpu.cases import TINY, CaseMaker
    from gpu.expert_cases import ExpertCases
    from gpu.latent_cases import LatentCases
    from gpu.layer_cases import LayerCases
    from gpu.quantized_cases import QuantizedCases
    from gpu.shapes import SHAPES
    from gpu.table_cases import TableCases

QUANTIZED = 4
"""So many of its cases: the others are the same in other formats and sizes."""


def maker_of(kind: type[CaseMaker], device: str) -> CaseMaker:
    return kind(
        shape=SHAPES["tiny MoE" if kind is ExpertCases else "tiny"],
        sizes=TINY,
        device=torch.device(device),
        dtype=torch.float32,
    )


@torch.inference_mode()
def check_every_case_and_its_peers_run(device: str) -> None:
    names = []
    all_of = (ExpertCases, LayerCases, TableCases, LatentCases)
    for kind, most in (*((kind, None) for kind in all_of), (QuantizedCases, QUANTIZED)):
        for make in [*maker_of(kind, device).cases()][:most]:
            case = make()
            case.run()
            for run in case.peers.values():
                run()
            assert case.work > 0, case.name
            names.append(case.name)
    assert len(set(names)) == len(names)


@torch.inference_mode()
def check_attention_has_peers_that_agree(device: str) -> None:
    for make in maker_of(AttentionCases, device).cases():
        case = make()
        case.run()
        results = {name: run() for name, run in case.peers.items()}
        for result in results.values():
            torch.testing.assert_close(result, results["torch SDPA"], atol=1e-4, rtol=1e-4)
