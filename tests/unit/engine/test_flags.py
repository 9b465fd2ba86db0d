"""The one table of engine flags."""

import argparse
import json
from dataclasses import fields

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import (
    OPEN_SETTINGS,
    AdapterConfig,
    AttentionLibrary,
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    GraphConfig,
    HostConfig,
    ParallelConfig,
    PreemptionMode,
    SchedulePolicy,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
    WritePolicy,
)
from tandem_engine.config.flags import add_engine_flags, engine_argv, engine_config

INTERNAL = {
    "context_length",  # resolved from --context-length and the checkpoint
    "init_new_token_ratio",
    "min_new_token_ratio",
    "new_token_ratio_decay_steps",
    "max_retractions",
}
"""Scheduler settings without a flag, on purpose."""


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    args.model, args.role = "model", "both"
    return args


def test_no_flags_give_the_defaults_of_the_config() -> None:
    assert engine_config(parse()) == EngineConfig(model_path="model", left_open=OPEN_SETTINGS)


def test_flags_survive_the_way_to_a_child_process() -> None:
    args = parse("--page-size", "4", "--disable-mixed-chunk", "--kv-cache-gib", "0.25", "--max-model-len", "99")
    assert engine_config(parse(*engine_argv(args))) == engine_config(args)
    assert engine_config(args).cache.page_size == 4
    assert engine_config(args).scheduler.enable_mixed_chunk is False
    assert engine_config(args).context_length == 99


def test_names_of_other_engines_are_understood() -> None:
    args = parse("--max-num-batched-tokens", "512", "--scheduling-policy", "priority")
    assert engine_config(args).scheduler.max_tokens_per_step == 512
    assert engine_config(parse(*engine_argv(args))).scheduler.schedule_policy is SchedulePolicy.PRIORITY


def test_adapters_survive_the_way_to_a_child_process(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b c").mkdir()
    as_json = json.dumps({"name": "b", "path": "b c", "base_model_name": "mini"})
    args = parse("--lora-modules", "a=a", as_json, "--lora-dir", str(tmp_path), "--max-lora-rank", "8")
    config = engine_config(args).adapters
    assert [(source.name, config.located(source.path)) for source in config.sources] == [
        ("a", tmp_path / "a"),
        ("b", tmp_path / "b c"),
    ]
    assert (config.max_rank, engine_config(parse(*engine_argv(args))).adapters) == (8, config)


def test_adapters_of_a_repeated_flag_add_up() -> None:
    args = parse("--lora-modules", "a=a", "b=b", "--lora-modules=c=c")
    assert [source.name for source in engine_config(args).adapters.sources] == ["a", "b", "c"]
    assert not engine_config(parse()).adapters.sources


WRONG_ADAPTERS = ["a", "=a", "a=", "a/b=a", "a:b=a", "{", '{"name": "a"}', '{"name": "a", "path": 1}', '{"lora": 1}']


@pytest.mark.parametrize("value", [*WRONG_ADAPTERS, '{"name": "a", "path": "b\\u0000"}'])
def test_adapter_without_name_or_folder_is_refused(value, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--lora-modules", value)
    assert stopped.value.code == 2
    assert "--lora-modules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-modules", "a=a", "a=b"], "two adapters have the name 'a'"),
        (["--lora-modules", "a=a", "b=b", "--max-cpu-loras", "1"], "has 2 adapters, at most 1 are kept"),
        (["--max-cpu-loras", "1", "--max-loras", "2"], "--max-cpu-loras 1 is below --max-loras 2"),
        (["--max-cpu-loras", "257"], "--max-cpu-loras must be between 1 and 256"),
    ],
)
def test_flags_of_adapters_that_contradict_are_refused(argv, message) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(parse(*argv))


@pytest.mark.parametrize("path", ["../out", "/", "link", "a/../../out"])
def test_adapter_outside_of_its_folder_is_refused(tmp_path, path) -> None:
    folder = tmp_path / "adapters"
    for each in (folder / "a", tmp_path / "out"):
        each.mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "out")
    config = engine_config(parse("--lora-dir", str(folder))).adapters
    assert config.located("a") == folder / "a"
    with pytest.raises(ConfigError, match=f"'{path}' is outside --lora-dir"):
        config.located(path)


def test_adapter_in_no_usable_path_is_a_config_error(tmp_path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for config, path in (
        (AdapterConfig(), "~no-such-user-x/a"),
        (AdapterConfig(folder="~no-such-user-x"), "a"),
        (AdapterConfig(folder=str(tmp_path)), "circle"),
        (AdapterConfig(folder=str(tmp_path)), "a\0b"),
    ):
        with pytest.raises(ConfigError, match="is no usable path"):
            config.located(path)


def test_defaults_are_not_passed_on() -> None:
    assert engine_argv(parse()) == []


def test_scheduler_settings_have_a_flag_or_are_listed_internal() -> None:
    settable = {
        name
        for name, value in (
            ("max_running_requests", "3"),
            ("max_tokens_per_step", "99"),
            ("long_prefill_token_threshold", "3"),
            ("priority_preemption_threshold", "3"),
            ("policy_ageing_seconds", "3"),
            ("watermark", "0.5"),
            ("schedule_policy", "lpm"),
            ("max_queued_requests", "3"),
            ("max_sessions", "3"),
            ("session_ttl", "3"),
            ("max_prefill_tokens", "3"),
            ("mixed_prefill_tokens", "3"),
            ("shared_prefill_tokens", "3"),
            ("scheduler_delay_factor", "0.5"),
            ("chunked_prefill_size", "3"),
            ("force_retract_every", "3"),
            ("force_fault_every", "3"),
            ("watchdog_timeout", "3"),
        )
        if str(getattr(engine_config(parse(f"--{name.replace('_', '-')}", value)).scheduler, name))
        in (value, f"{value}.0")
    }
    switches = {"enable_mixed_chunk", "enable_overlap", "audit_every_step", "preemption_mode"}
    assert settable | switches | INTERNAL == {field.name for field in fields(SchedulerConfig)}


@pytest.mark.parametrize("flag", ["--kv-cache-gib", "--mem-fraction-static", "--watchdog-timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "much", ""])
def test_size_that_is_no_positive_number_is_refused(flag, value, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(flag, value)
    assert stopped.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "1_000", "10k", " 5", "1.5", "", "٣"])
def test_number_that_is_not_plain_digits_is_refused(value, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--page-size", value)
    assert stopped.value.code == 2
    assert "--page-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "flag"),
    [
        (lambda: CacheConfig(page_size=0), "--page-size"),
        (lambda: CacheConfig(num_pages=1), "--num-pages"),
        (lambda: CacheConfig(kv_cache_bytes=-1), "--kv-cache-gib"),
        (lambda: CacheConfig(mem_fraction_static=1.1), "--mem-fraction-static"),
        (lambda: CacheConfig(num_pages=7, kv_cache_bytes=1000), "--num-pages and --kv-cache-gib both"),
        (lambda: CacheConfig(num_pages=7, mem_fraction_static=0.5), "--num-pages and --mem-fraction-static both"),
        (lambda: SchedulerConfig(watchdog_timeout=0.0), "--watchdog-timeout"),
        (lambda: SchedulerConfig(max_running_requests=0), "--max-running-requests"),
        (
            lambda: SchedulerConfig(max_running_requests=8, max_tokens_per_step=8),
            "--max-tokens-per-step 8 .* at least 9",
        ),
        (lambda: SchedulerConfig(long_prefill_token_threshold=-1), "--long-prefill-token-threshold"),
        (lambda: SchedulerConfig(policy_ageing_seconds=0.0), "--policy-ageing-seconds"),
        (lambda: SchedulerConfig(policy_ageing_seconds=float("nan")), "--policy-ageing-seconds"),
        (lambda: SchedulerConfig(priority_preemption_threshold=0), "--priority-preemption-threshold"),
        (lambda: SchedulerConfig(watermark=1.0), "--watermark"),
        (
            lambda: EngineConfig(
                model_path="model",
                cache=CacheConfig(enable_prefix_cache=False),
                scheduler=SchedulerConfig(schedule_policy=SchedulePolicy.LPM),
            ),
            "--schedule-policy lpm .* --disable-radix-cache",
        ),
        (lambda: CacheConfig(kv_cache_bytes=100).pages_for(60), "--kv-cache-gib"),
        (lambda: HostConfig(ratio=0.0), "--hicache-ratio"),
        (lambda: HostConfig(ratio=float("nan")), "--hicache-ratio"),
        (lambda: HostConfig(size_bytes=-1), "--hicache-size"),
        (lambda: HostConfig(storage_bytes=-1), "--hicache-storage-size"),
        (lambda: HostConfig(swap_bytes=-1), "--swap-space"),
        (lambda: HostConfig(prefetch_timeout=-1.0), "--hicache-storage-prefetch-timeout"),
        (lambda: DisaggConfig(prefix_fetch_timeout=0.0), "--prefix-fetch-timeout"),
        (lambda: DisaggConfig(grant_timeout=0.0), "--grant-timeout must be a positive number of seconds, got 0.0"),
        (
            lambda: DisaggConfig(hold_timeout=float("nan")),
            "--hold-timeout must be a positive number of",
        ),
        (lambda: HostConfig(storage_dir="/kv"), "--hicache-storage-dir /kv .* --enable-hierarchical-cache"),
        (
            lambda: HostConfig(enable_cache=True, size_bytes=99).cache_pages(device_pages=4, page_bytes=100),
            "--hicache-size .* not one KV page of 100 bytes",
        ),
        (
            lambda: HostConfig(enable_cache=True, ratio=0.1).cache_pages(device_pages=4, page_bytes=100),
            "--hicache-ratio 0.1 holds not one",
        ),
        (lambda: HostConfig(swap_bytes=99).swap_pages(100), "--swap-space .* not one KV page"),
        (
            lambda: CacheConfig(enable_prefix_cache=False, host=HostConfig(enable_cache=True)),
            "--enable-hierarchical-cache .* --disable-radix-cache",
        ),
        (
            lambda: EngineConfig(model_path="model", scheduler=SchedulerConfig(preemption_mode=PreemptionMode.SWAP)),
            "--preemption-mode swap .* --swap-space",
        ),
        (lambda: engine_config(parse("--swap-space", "inf")), "--swap-space must be a finite number"),
        (lambda: engine_config(parse("--session-kv-gib", "inf")), "--session-kv-gib must be a finite number"),
        (lambda: engine_config(parse("--session-kv-gib", "nan")), "--session-kv-gib must be a finite number"),
        (
            lambda: EngineConfig(
                model_path="model",
                parallel=ParallelConfig(tp_size=2),
                cache=CacheConfig(host=HostConfig(enable_cache=True, storage_dir="/blocks")),
            ),
            "--hicache-storage-dir needs --tensor-parallel-size 1, got 2",
        ),
    ],
)
def test_setting_that_cannot_work_names_its_flag(build, flag) -> None:
    with pytest.raises(ConfigError, match=flag):
        build()


def test_accelerator_is_divided_unless_size_is_set() -> None:
    assert CacheConfig().for_device("cuda").mem_fraction_static == 0.88
    assert CacheConfig().for_device("cpu") == CacheConfig()
    assert CacheConfig(num_pages=7).for_device("cuda") == CacheConfig(num_pages=7)


def test_pool_takes_the_memory_it_is_given() -> None:
    assert CacheConfig(kv_cache_bytes=1000).pages_for(100) == 10
    assert CacheConfig(num_pages=7).pages_for(100) == 7
    assert CacheConfig().pages_for(1 << 20) == 512


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp-size", "--tp"])
def test_number_of_ranks_has_the_names_that_others_use(flag) -> None:
    args = parse(flag, "2", "--transport", "none", "--dist-timeout", "30")
    assert engine_config(args).parallel.tp_size == 2
    assert engine_config(parse(*engine_argv(args))) == engine_config(args)


def test_several_ranks_may_draft() -> None:
    args = parse(
        "--tp", "2", "--transport", "none", "--speculative-algorithm", "DRAFT", "--speculative-draft-model-path", "d"
    )
    assert engine_config(args).speculative.needs_draft_model


def test_host_memory_is_sized_by_ratio_or_in_bytes() -> None:
    assert HostConfig().cache_pages(device_pages=10, page_bytes=100) == 0
    assert HostConfig(enable_cache=True, ratio=1.5).cache_pages(device_pages=10, page_bytes=100) == 15
    assert HostConfig(enable_cache=True, size_bytes=1050).cache_pages(device_pages=10, page_bytes=100) == 10
    assert HostConfig(swap_bytes=250).swap_pages(100) == 2


def test_flags_of_the_tiers_reach_the_config() -> None:
    args = parse(
        *("--enable-hierarchical-cache", "--hicache-write-policy", "write_back", "--hicache-size", "0.5"),
        *("--hicache-storage-dir", "/kv", "--hicache-storage-size", "2", "--hicache-storage-prefetch-timeout", "0"),
        *("--swap-space", "1", "--preemption-mode", "swap"),
    )
    assert engine_config(parse(*engine_argv(args))) == engine_config(args)
    config = engine_config(args)
    assert config.scheduler.preemption_mode is PreemptionMode.SWAP
    assert config.cache.host == HostConfig(
        enable_cache=True,
        size_bytes=1 << 29,
        write_policy=WritePolicy.WRITE_BACK,
        storage_dir="/kv",
        storage_bytes=2 << 30,
        prefetch_timeout=0.0,
        swap_bytes=1 << 30,
    )


def test_speculation_defaults_to_off_and_flags_set_its_config() -> None:
    assert engine_config(parse()).speculative.algorithm is None
    args = parse(
        *(
            "--speculative-algorithm",
            "DRAFT",
            "--speculative-draft-model",
            "small",
            "--speculative-num-draft-tokens",
            "7",
        ),
        *("--ngram-prompt-lookup-min", "3", "--ngram-prompt-lookup-max", "5"),
        *("--speculative-disable-by-batch-size", "9", "--speculative-disable-adaptive"),
    )
    expected = SpecConfig(
        algorithm=SpecAlgorithm.DRAFT,
        draft_model_path="small",
        num_draft_tokens=7,
        prompt_lookup_min=3,
        prompt_lookup_max=5,
        disable_by_batch_size=9,
        adaptive=False,
    )
    assert engine_config(args).speculative == expected
    assert engine_config(parse(*engine_argv(args))).speculative == expected


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--speculative-num-draft-tokens", "16"], "--speculative-num-draft-tokens must be between 1 and 15, got 16"),
        (["--ngram-prompt-lookup-min", "5"], "--ngram-prompt-lookup-min and -max .* got 5 and 4"),
        (["--ngram-prompt-lookup-max", "33"], "max <= 32"),
        (["--speculative-algorithm", "EAGLE"], "EAGLE needs --speculative-draft-model-path"),
        (["--speculative-draft-model-path", "x"], "DRAFT or EAGLE alone, which is not given"),
        (["--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "x"], "which is NGRAM"),
    ],
)
def test_speculative_setting_that_cannot_work_names_its_flag(argv, named) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_config(parse(*argv))


def test_flags_of_a_gpu_reach_the_config_and_a_child_process() -> None:
    args = parse("--cuda-graph-bs", "1", "4", "16", "--device", "cuda:2", "--cuda-graph-max-bs", "16")
    args.attention_backend = parse("--attention-backend", "FLASH_ATTN").attention_backend
    for each in (args, parse(*engine_argv(args))):
        config = engine_config(each)
        assert config.device == "cuda:2"
        assert config.attention is AttentionLibrary.FLASH, "vLLM writes it in capitals"
        assert config.graphs == GraphConfig(sizes=(1, 4, 16), max_rows=16)
    assert not engine_config(parse("--disable-cuda-graph")).graphs.enabled
    assert not engine_config(parse("--disable-prefill-cuda-graph")).graphs.prompts
    prompts = engine_config(parse("--cuda-graph-bs-prefill", "16", "64", "--cuda-graph-max-bs-prefill", "64"))
    assert prompts.graphs == GraphConfig(prompt_sizes=(16, 64), max_prompt_tokens=64)


@pytest.mark.parametrize("value", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:1000", ""])
def test_unknown_device_is_refused(value, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--device", value)
    assert stopped.value.code == 2
    assert "must be cpu, cuda or cuda:N" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--device must be cpu, cuda or cuda:N"):
        EngineConfig(model_path="x", device=value)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("context-length", "32k", 32_000),
        ("context-length", "32Ki", 32_768),
        ("context-length", "1.5Ki", 1_536),
        ("context-length", "1M", 1_000_000),
        ("context-length", "0", 0),
        ("num-pages", "2Ki", 2_048),
        ("kv-cache-gib", "4", 4.0),
        ("kv-cache-gib", "4GiB", 4.0),
        ("kv-cache-gib", "512MiB", 0.5),
        ("hicache-size", "1TiB", 1024.0),
        ("swap-space", "1GB", 10**9 / 2**30),
        ("link-probe-mib", "16", 16),
        ("link-probe-mib", "1GiB", 1_024),
    ],
)
def test_size_may_have_a_unit(flag, text, value):
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    args = parser.parse_args([f"--{flag}", text])
    assert getattr(args, flag.replace("-", "_")) == value
    # And reaches a child process.
    assert parser.parse_args(engine_argv(args)) == args


@pytest.mark.parametrize(
    ("flag", "text", "sentence"),
    [
        ("context-length", "32K", "must be a whole number, got '32K': k is 1,000, Ki is 1,024"),
        ("context-length", "1.0001Ki", "must be a whole number, got '1.0001Ki'"),
        ("context-length", "4GiB", "must be a whole number, got '4GiB'"),
        ("context-length", "-1k", "must be a whole number, got '-1k'"),
        ("max-running-requests", "0k", "must be at least 1, got 0"),
        ("kv-cache-gib", "4G", "must have a unit of bytes, as in 4GB, got '4G'"),
        ("kv-cache-gib", "0MiB", "must be a number above 0"),
        ("kv-cache-gib", "1e999", "must be a number above 0, got '1e999'"),
        ("swap-space", "much", "must be a number of GiB or a size such as 4GiB, got 'much'"),
        ("link-probe-mib", "1.5KiB", "must be a whole number of MiB, got '1.5KiB'"),
    ],
)
def test_malformed_size_is_refused(flag, text, sentence, capsys):
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--{flag}={text}"])
    assert sentence in capsys.readouterr().err
