"""The commands that copy data: to other systems and from them, to another place, and within a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.arguments import FINDING, CheckpointsArgument, JsonOption, PathArgument, ReadBackOption, WorkersOption


def export(
    path: PathArgument,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The new folder.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="hf: Hugging Face; peft: an adapter; dcp: PyTorch DCP; megatron: Megatron-core; deepspeed-universal.",
        ),
    ] = "hf",
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="GLOB", help="Write only names that match; may be repeated."),
    ] = None,
    mapping: Annotated[str, typer.Option("--mapping", metavar="FILE", help="Rules of a mapping (TOML).")] = "",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Convert floating tensors, such as to bfloat16.")
    ] = "",
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Most bytes of tensors in one file.")
    ] = "5GB",
    config: Annotated[
        str,
        typer.Option("--config", metavar="FOLDER", help="With hf, peft: copy the configuration in this folder."),
    ] = "",
    adapter: Annotated[str, typer.Option("--adapter", metavar="NAME", help="With peft: the adapter to write.")] = "",
    workers: WorkersOption = None,
    read_back: ReadBackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint for other systems. They are Hugging Face, PEFT, DCP, DeepSpeed and Megatron.

    Call it again to go on after a failure.
    """
    from holdfast.cli.export import ExportOptions, export

    options = ExportOptions(to, tuple(select or ()), mapping, dtype, shard_size, config, adapter, workers, read_back)
    export(path, dst, options, as_json=as_json)


def import_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of another system, such as a Hugging Face folder.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a new run, or its URL.")],
    *,
    step: Annotated[
        int,
        typer.Option(
            "--step", min=0, help="The last finished step, counted from 0; a job goes on with the one after it."
        ),
    ],
    workers: WorkersOption = None,
    read_back: ReadBackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a checkpoint of another system into a new run. Call it again to go on after a failure."""
    from holdfast.cli.importing_command import import_checkpoint

    import_checkpoint(source, run, step=step, as_json=as_json, workers=workers, read_back=read_back)


def cp(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A run (folder or URL), or one checkpoint: RUN@step=700, RUN@3.12.")
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="A new run, or an earlier copy of the same one.")],
    *,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged checkpoints out, and copy the others.")
    ] = False,
    read_back: ReadBackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a run, or one checkpoint of it, to another place. Call it again to go on, or to bring what is new."""
    from holdfast.cli.cp import cp

    if not cp(src, dst, skip_damaged=skip_damaged, read_back=read_back, as_json=as_json):
        raise typer.Exit(FINDING)


def compact(paths: CheckpointsArgument, *, as_json: JsonOption = False) -> None:
    """Make checkpoints self-contained. Copies the files that they share with earlier ones. A run is its head."""
    from holdfast.cli.compact import compact

    compact(paths, as_json=as_json)
