"""Rank 0's steps in a save after all ranks have agreed on a plan: publish the manifest, then seal and commit."""

from __future__ import annotations

import xxhash

from holdfast.agreement.planner import AgreedPlan
from holdfast.agreement.request import SaveRequest
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import Commit
from holdfast.run.complete import StoredManifest, seal_and_commit
from holdfast.run.history import Run
from holdfast.run.references import candidates_for
from holdfast.saving.messages import Planned, Written


class StoredPlace:
    """The `Placing` of a save: it turns a plan into a checkpoint in storage, written by `num_ranks` ranks."""

    def __init__(self, request: SaveRequest, *, num_ranks: int) -> None:
        self._request = request
        self._num_ranks = num_ranks
        self._run: Run | None = None
        self._planned: Planned | None = None
        self._manifest = b""

    def place(self, agreed: AgreedPlan) -> Planned:
        """Take the next place of the run and publish the manifest of the checkpoint there."""
        self._run, identity = self._request.take_place(world_size=self._num_ranks)
        folder, draft = records.folder_name(identity.step, identity.checkpoint_id), agreed.memory.draft
        references = candidates_for(self._run, draft.still_files, place=identity.place, folder=folder)
        self._manifest = draft.encode(identity, agreed.diverged, references)
        key = records.checkpoint_key(folder, fmt.NAME)
        self._request.storage.create(key, self._manifest)
        self._planned = Planned(
            self._request.storage.path(key),
            folder,
            identity.checkpoint_id,
            identity.place,
            len(self._manifest),
            xxhash.xxh3_128_hexdigest(self._manifest),
            agreed.memory.plan_id,
            agreed.diverged,
            references,
        )
        return self._planned

    def commit(self, written: list[Written]) -> Commit:
        """Seal and commit the checkpoint. Call it once all data files are durable; `written` has one entry per rank.

        Raises:
            FencedError: another job opened a newer epoch of the run.
        """
        assert self._planned is not None
        assert self._run is not None
        manifest = fmt.decode(self._manifest, path=self._planned.folder)
        by_name = {file.name: file for each in written for file in each.files}
        files = tuple(map(by_name.__getitem__, manifest.file_names))
        self._run.check_fence(self._planned.place.epoch)
        stored = StoredManifest(self._planned.folder, self._manifest, manifest)
        return seal_and_commit(self._run, stored, files)
