"""The command that advises on saves and their protection."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.arguments import EventsOption, JsonOption
from holdfast.errors import ConfigurationError

FromOption = Annotated[
    str,
    typer.Option(
        "--from", metavar="RUN", help="Take from the recorded events of this run what you do not give yourself."
    ),
]
#: The costs of the tiers, which all have one form.
DurableOption = Annotated[
    str,
    typer.Option(
        "--durable",
        metavar="TIER",
        help="Storage: the time that a save holds training up, until it is complete, and of a restore; and by how "
        "much a save slows training down, if it does. Such as 3s,180s,300s,1%.",
    ),
]
PeersOption = Annotated[
    str, typer.Option("--peers", metavar="TIER", help="Copies in the memory of other nodes, if there are any.")
]
OwnMemoryOption = Annotated[
    str, typer.Option("--memory", metavar="TIER", help="The memory of the own node, if saves go there.")
]
MttfOption = Annotated[
    str, typer.Option("--mttf", metavar="TIME", help="Mean time to a failure of the whole job, such as 3h.")
]
FailuresOption = Annotated[
    str, typer.Option("--failures", metavar="NAME", help="Or published failures: llama3, rsc1, rsc2, infinitehbd.")
]
NodesOption = Annotated[
    int, typer.Option("--nodes", metavar="N", min=0, help="Number of nodes, with --failures or --protect.")
]
SharesOption = Annotated[
    str,
    typer.Option(
        "--shares",
        metavar="P,N,J",
        help="Shares of failures that end processes, take a node, or take more. Default: 23%,75%,2%, as Llama 3.",
    ),
]
DetectionOption = Annotated[
    str, typer.Option("--detection", metavar="TIME", help="Time from a failure to the restore.")
]
StepOption = Annotated[str, typer.Option("--step", metavar="TIME", help="Time of a training step.")]
OverheadOption = Annotated[
    str, typer.Option("--max-overhead", metavar="SHARE", help="What all saves may cost, such as 1%.")
]
InFlightOption = Annotated[
    int, typer.Option("--in-flight", metavar="N", min=1, help="Saves to one tier that may overlap.")
]
SizeOption = Annotated[str, typer.Option("--size", metavar="SIZE", help="Size of a checkpoint, such as 912GB.")]
PriceOption = Annotated[
    float, typer.Option("--cost-per-hour", metavar="PRICE", min=0, help="Price of an hour of the whole job.")
]
#: The options of the advice on protection.
ProtectOption = Annotated[
    str,
    typer.Option(
        "--protect", metavar="SIZE", help="Compare ways to protect snapshots of this size per node, such as 480GB."
    ),
]
GenerationsOption = Annotated[
    int, typer.Option("--generations", metavar="N", min=2, help="With --protect: snapshots that a node keeps.")
]
NetworkOption = Annotated[
    str, typer.Option("--network", metavar="RATE", help="With --protect: rate of a node's network, such as 400Gbit/s.")
]
DomainsOption = Annotated[
    int,
    typer.Option(
        "--domains", metavar="N", min=0, help="With --protect: racks or other failure domains, of as many nodes each."
    ),
]


def advise(
    *,
    run: FromOption = "",
    events: EventsOption = "",
    durable: DurableOption = "",
    peers: PeersOption = "",
    memory: OwnMemoryOption = "",
    mttf: MttfOption = "",
    failures: FailuresOption = "",
    nodes: NodesOption = 0,
    shares: SharesOption = "",
    detection: DetectionOption = "60s",
    step: StepOption = "",
    max_overhead: OverheadOption = "",
    in_flight: InFlightOption = 1,
    size: SizeOption = "",
    cost_per_hour: PriceOption = 0.0,
    protect: ProtectOption = "",
    generations: GenerationsOption = 2,
    network: NetworkOption = "",
    domains: DomainsOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Advise how often to save. Prints an interval per tier, the time that is lost, and what changes would buy.

    With --protect, compare copies and parity of snapshots instead: what they cost, and what they survive.
    """
    intervals = run or durable or peers or memory or mttf or failures
    if (protect and intervals) or (not protect and (network or domains)):
        raise ConfigurationError(
            "--protect asks another question than how often to save.",
            code="config.option",
            action="With --protect, give --nodes, --generations, --network and --domains; without it, the others.",
        )
    if protect:
        from holdfast.cli.advise_protection import ProtectionQuestion, protection_advice

        protection_advice(ProtectionQuestion(protect, nodes, generations, network, domains), as_json=as_json)
        return
    from holdfast.cli.advise import Given, advice

    given = Given(
        memory=memory,
        peers=peers,
        durable=durable,
        mttf=mttf,
        failures=failures,
        nodes=nodes,
        shares=shares,
        detection=detection,
        step=step,
        max_overhead=max_overhead,
        in_flight=in_flight,
        size=size,
        cost_per_hour=cost_per_hour,
        run=run,
        events=events,
    )
    advice(given, as_json=as_json)
