"""Mutations of what keepers say to each other and hold for each other, and the tests that must find them."""

from __future__ import annotations

from tests.known_defects.mutants import Mutation

PEER_MUTATIONS = [
    Mutation(  # blocks of a row unverified
        "keeper/test_parity_rows.py::test_parity_is_made_of_no_slot_that_changed_after_it_was_sealed[data]",
        "keeper/parity_rows.py",
        "        if bad_blocks(out, self._table, first=first, kind=kind):",
        "        if first < 0:",
    ),
    Mutation(  # header of a row unverified
        "keeper/test_parity_rows.py::test_parity_is_made_of_no_slot_that_changed_after_it_was_sealed[header]",
        "keeper/parity_rows.py",
        "        if self._header.tobytes() != container.header(manifest, layout, table):\n"
        "            raise _changed(self._way, file)\n",
        "",
    ),
    Mutation(  # stranger's offer
        "keeper/test_parity_rows.py::test_offers_that_no_partner_makes_are_refused",
        "keeper/parity_rows.py",
        "        if peers is None or offer.sender not in peers.table.group:",
        "        if peers is None:",
    ),
    Mutation(  # offers unchecked
        "keeper/test_parity_rows.py::test_offers_that_no_partner_makes_are_refused",
        "keeper/parity_rows.py",
        "        _check(offer, sealing, peers)\n",
        "",
    ),
    Mutation(  # file offered twice
        "keeper/test_parity_rows.py::test_offers_that_no_partner_makes_are_refused",
        "keeper/parity_rows.py",
        " or len({*parts}) != len(parts):",
        ":",
    ),
    Mutation(  # offer without its files
        "keeper/test_parity_rows.py::test_offers_that_no_partner_makes_are_refused",
        "keeper/parity_rows.py",
        "    if {part.file for part in parts} != peers.files(sealing, offer.sender) or",
        "    if",
    ),
    Mutation(  # offer without digests
        "keeper/test_parity_rows.py::test_offers_that_no_partner_makes_are_refused",
        "keeper/parity_rows.py",
        "        if len(slot.files) != len(slot.digests):",
        "        if not slot.files:",
    ),
    Mutation(  # offer of another layout
        "keeper/test_parity_rows.py::test_offers_that_no_partner_makes_are_refused",
        "keeper/parity_rows.py",
        "        if (part.data_start, part.nbytes) != (layout.data_start, layout.nbytes):\n            raise",
        "        if not layout.nbytes:\n            raise",
    ),
    Mutation(  # sizes of a chain unchecked
        "keeper/test_rebuilding.py::test_sums_whose_sizes_do_not_fit_are_refused",
        "keeper/rebuilding.py",
        "        if not max(hop.nbytes, upstream_nbytes) <= hop.sum_nbytes == get.nbytes <= PIECE_NBYTES:",
        "        if not hop:",
    ),
    Mutation(  # hop of another size
        "keeper/test_rebuilding.py::test_sums_whose_sizes_do_not_fit_are_refused",
        "keeper/rebuilding.py",
        "        if data.size != hop.nbytes:",
        "        if data is None:",
    ),
    Mutation(  # addresses missing
        "keeper/test_rebuilding.py::test_requests_to_rebuild_what_the_group_does_not_have_are_refused",
        "keeper/rebuilding.py",
        "    if len(request.addresses) != num_nodes or not numbers",
        "    if not numbers",
    ),
    Mutation(  # numbers unchecked
        "keeper/test_rebuilding.py::test_requests_to_rebuild_what_the_group_does_not_have_are_refused",
        "keeper/rebuilding.py",
        "    if len(request.addresses) != num_nodes or not numbers <= set(range(num_nodes)):",
        "    if len(request.addresses) != num_nodes:",
    ),
    Mutation(  # files of other sizes
        "keeper/test_rebuilding.py::test_requests_to_rebuild_what_the_group_does_not_have_are_refused",
        "keeper/rebuilding.py",
        "        if line is None or (part.data_start, part.nbytes) not in [\n"
        "            (file.data_start, file.nbytes) for file in line.files if file.file == part.file\n"
        "        ]:",
        "        if line is None:",
    ),
    Mutation(  # data of a survivor unchecked
        "keeper/test_rebuilding.py::test_damage_in_a_slot_and_in_parity_of_survivors_is_found_and_done_without",
        "keeper/rebuilding.py",
        "                sealing.check(slot)\n",
        "",
    ),
    Mutation(  # broken range never ends
        "keeper/test_copy_reception.py::test_a_range_whose_connection_broke_is_sent_again_by_a_new_offer",
        "keeper/copies.py",
        '        """The connection broke."""\n        self._copies.end_transfer(self._incoming)',
        '        """The connection broke."""',
    ),
    Mutation(  # range beyond file
        "protection/test_stripes.py::test_a_range_that_the_owner_does_not_have_is_refused",
        "protection/stripes.py",
        " or data.start + data.nbytes > self.files[number].nbytes:",
        ":",
    ),
    Mutation(  # negative start
        "protection/test_stripes.py::test_a_range_that_the_owner_does_not_have_is_refused",
        "protection/stripes.py",
        "data.start < 0 or data.nbytes < 0 or data.start +",
        "data.nbytes < 0 or data.start +",
    ),
    Mutation(  # no or three losses
        "protection/test_stripes.py::test_groups_without_parity_are_refused",
        "protection/stripes.py",
        "        if not 1 <= self.losses <= 2:",
        "        if not self.losses:",
    ),
    Mutation(  # too many rows
        "protection/test_stripes.py::test_groups_without_parity_are_refused",
        "protection/stripes.py",
        "        if not 1 <= self.num_data <= MAX_NUM_DATA:",
        "        if not 1 <= self.num_data:",
    ),
    Mutation(  # too few rows
        "protection/test_stripes.py::test_groups_without_parity_are_refused",
        "protection/stripes.py",
        "        if not 1 <= self.num_data <= MAX_NUM_DATA:",
        "        if self.num_data > MAX_NUM_DATA:",
    ),
    Mutation(  # node twice
        "protection/test_stripes.py::test_groups_without_parity_are_refused",
        "protection/stripes.py",
        "        if len(self._numbers) < len(self.lines):",
        "        if not self._numbers:",
    ),
    Mutation(  # more lost than parity covers
        "protection/test_stripes.py::test_more_losses_than_parity_covers_are_refused_with_the_nodes",
        "protection/chains.py",
        "    if len(gone) > striping.losses:",
        "    if len(gone) > len(striping.lines):",
    ),
    Mutation(  # nothing lost rebuilt
        "protection/test_stripes.py::test_nodes_that_are_not_lost_have_nothing_to_rebuild",
        "protection/chains.py",
        "        if owner not in lost:",
        "        if owner not in striping.nodes:",
    ),
    Mutation(  # unlike numbers of domains
        "protection/test_placement.py::test_nodes_that_give_unlike_numbers_of_domains_are_refused",
        "protection/neighbourhood.py",
        "        if len(card.domains) != depth:",
        "        if len(card.domains) > 99:",
    ),
    Mutation(  # too few nodes
        "protection/test_placement.py::test_too_few_nodes_are_refused",
        "protection/policies.py",
        "    if num_nodes < least:",
        "    if num_nodes < 1:",
    ),
    Mutation(  # domain takes too many nodes of a group
        "protection/test_placement.py::test_parity_groups_survive_the_loss_of_each_domain_that_they_can",
        "protection/placement.py",
        "        return None if most > policy.losses else",
        "        return None if most > len(cards) else",
    ),
    Mutation(  # group of all nodes counts
        "protection/test_placement.py::test_a_group_of_all_nodes_says_nothing",
        "protection/neighbourhood.py",
        "if 1 < len(nodes) < len(cards)}",
        "if 1 < len(nodes)}",
    ),
    Mutation(  # another polynomial
        "protection/test_erasure.py::test_products_of_all_elements_agree_with_long_multiplication",
        "protection/erasure.py",
        "_POLYNOMIAL: Final = 0x11D",
        "_POLYNOMIAL: Final = 0x11B",
    ),
    Mutation(  # negative chance
        "protection/test_survival.py::test_geminis_limit_for_groups",
        "protection/survival.py",
        "    return max(0.0, 1 - fatal / comb",
        "    return (1 - fatal / comb",
    ),
    Mutation(  # client speaks to any version
        "peers/test_handshake.py::test_another_version_is_named_on_both_sides[2]",
        "peers/handshake.py",
        "    if hello.version != VERSION:\n        versions",
        "    if not hello.version:\n        versions",
    ),
    Mutation(  # client takes its own messages
        "peers/test_handshake.py::test_a_server_that_sends_everything_back_is_recognised",
        "peers/handshake.py",
        "    if hello.role != _SERVER:",
        "    if not hello.role:",
    ),
    Mutation(  # secret not asked for
        "peers/test_handshake.py::test_a_client_with_another_secret_is_told_so_and_may_try_again",
        "peers/handshake.py",
        "    if verdict == Verdict.WRONG_SECRET:",
        "    if verdict < 0:",
    ),
    Mutation(  # server need not prove
        "peers/test_handshake.py::test_a_server_that_does_not_prove_the_secret_is_refused",
        "peers/handshake.py",
        "    if not hmac.compare_digest(proof, _proof(secret, _SERVER, mine, theirs)):",
        "    if not proof:",
    ),
    Mutation(  # full server taken
        "peers/test_tcp.py::test_a_listener_serves_so_many_connections_and_tells_the_next_one",
        "peers/handshake.py",
        "    if verdict != Verdict.WELCOME:",
        "    if verdict < 0:",
    ),
    Mutation(  # server admits any version
        "peers/test_handshake.py::test_another_version_is_named_on_both_sides[2]",
        "peers/handshake.py",
        "    if hello.version != VERSION:\n        return",
        "    if not hello.version:\n        return",
    ),
    Mutation(  # server takes its own messages
        "peers/test_handshake.py::test_a_listener_whose_hello_is_sent_back_to_it_is_not_deceived",
        "peers/handshake.py",
        "    if hello.role != _CLIENT:",
        "    if not hello.role:",
    ),
    Mutation(  # anybody admitted
        "peers/test_handshake.py::test_a_client_with_another_secret_is_told_so_and_may_try_again",
        "peers/handshake.py",
        "    if not hmac.compare_digest(wire.receive(_PROOF_NBYTES, deadline), _proof(secret, _CLIENT, theirs, mine)):",
        "    if not wire.receive(_PROOF_NBYTES, deadline):",
    ),
    Mutation(  # connections without end
        "peers/test_tcp.py::test_a_listener_serves_so_many_connections_and_tells_the_next_one",
        "peers/handshake.py",
        "Verdict.WELCOME if has_room() else",
        "Verdict.WELCOME if has_room() or mine else",
    ),
    Mutation(  # any program is a keeper
        "peers/test_handshake.py::test_another_program_at_the_address_of_a_peer_is_recognised[HTTP]",
        "peers/handshake.py",
        'if magic == MAGIC else b""',
        'if magic else b""',
    ),
    Mutation(  # proof without role
        "peers/test_handshake.py::test_a_server_that_does_not_prove_the_secret_is_refused",
        "peers/handshake.py",
        "role + client_hello + server_hello",
        "client_hello + server_hello",
    ),
    Mutation(  # proof without client's hello
        "peers/test_handshake.py::test_the_proofs_of_both_ends_bind_both_hellos_and_the_role_of_the_prover",
        "peers/handshake.py",
        "role + client_hello + server_hello",
        "role + server_hello",
    ),
    Mutation(  # proof without server's hello
        "peers/test_handshake.py::test_a_recorded_conversation_that_is_played_again_opens_nothing",
        "peers/handshake.py",
        "role + client_hello + server_hello",
        "role + client_hello",
    ),
    Mutation(  # nonce known
        "peers/test_handshake.py::test_a_recorded_conversation_that_is_played_again_opens_nothing",
        "peers/handshake.py",
        "secrets.token_bytes(_NONCE_NBYTES)",
        "bytes(_NONCE_NBYTES)",
    ),
    Mutation(  # short secret
        "peers/test_tcp.py::test_a_secret_that_can_be_guessed_is_refused",
        "peers/handshake.py",
        "    if len(secret) < MIN_SECRET_NBYTES:",
        "    if not secret:",
    ),
    Mutation(  # message of any size
        "peers/test_hostile_peers.py::test_sound_requests_with_changes_do_no_harm",
        "peers/wire.py",
        "        if nbytes > MAX_NBYTES:",
        "        if nbytes > 1 << 40:",
    ),
    Mutation(  # message undigested
        "peers/test_hostile_peers.py::test_a_message_with_a_wrong_bit_is_not_carried_out",
        "peers/wire.py",
        "        if xxhash.xxh3_64_digest(message) != digest:",
        "        if not digest:",
    ),
    Mutation(  # one deadline to receive all blocks
        "peers/test_wire.py::test_each_block_that_is_received_has_its_own_deadline",
        "peers/wire.py",
        "                received(reported)\n                end_s = deadline()\n",
        "                received(reported)\n",
    ),
    Mutation(  # one deadline to send all blocks
        "peers/test_wire.py::test_each_block_of_a_file_has_its_own_deadline",
        "peers/wire.py",
        "                end_s, next_block = deadline(), start + BLOCK_NBYTES\n",
        "                next_block = start + BLOCK_NBYTES\n",
    ),
    Mutation(  # short file sent
        "peers/test_tcp.py::test_a_slot_that_was_cut_short_is_reported_and_the_peer_drops_the_range",
        "peers/wire.py",
        "            if not sent:\n                raise _too_short(region)",
        "            if not sent:\n                return",
    ),
    Mutation(  # stalled send without deadline
        "peers/test_tcp.py::test_a_peer_that_does_not_take_its_bytes_meets_the_deadline",
        "peers/wire.py",
        '        if left_s <= 0:\n            raise TimeoutError("the deadline is over")\n        microseconds',
        "        microseconds",
    ),
    Mutation(  # stalled send given up
        "peers/test_wire.py::test_a_peer_that_takes_nothing_for_a_while_gets_all_bytes_of_a_file",
        "peers/wire.py",
        "            except BlockingIOError:  # the other end took nothing for a while\n                continue",
        "            except ValueError:  # the other end took nothing for a while\n                continue",
    ),
    Mutation(  # arrival waited for without deadline
        "peers/test_wire.py::test_bytes_that_do_not_arrive_are_not_waited_for_longer_than_the_deadline",
        "peers/wire.py",
        "            if time.monotonic() > end_s:\n"
        '                raise TimeoutError("the deadline is over")\n'
        "            time.sleep",
        "            time.sleep",
    ),
    Mutation(  # answer does not end the wait
        "peers/test_wire.py::test_an_answer_ends_the_wait_for_bytes_to_arrive",
        "peers/wire.py",
        " and not self._readable.poll(0):",
        ":",
    ),
    Mutation(  # inherited connection stays
        "peers/test_wire.py::test_a_connection_that_a_child_has_inherited_ends_when_it_is_closed",
        "peers/wire.py",
        "        self.cut()\n        with self._ending:\n            self._socket.close()",
        "        with self._ending:\n            self._socket.close()",
    ),
    Mutation(  # copy received twice
        "keeper/test_copy_reception.py::test_a_copy_that_came_in_several_ranges_is_kept_and_not_wanted_again",
        "keeper/copies.py",
        "            if any(_is_of(slot, offer) for slot in self._copies.values()):",
        "            if any(_is_of(slot, offer) for slot in ()):",
    ),
    Mutation(  # range outside slot
        "keeper/test_copy_reception.py::test_bytes_beyond_the_copy_are_refused_and_the_copy_goes_on",
        "keeper/copies.py",
        "            if put.start < 0 or put.nbytes < 0 or put.start + put.nbytes > incoming.slot.nbytes:",
        "            if not put:",
    ),
    Mutation(  # range before generation
        "keeper/test_copy_reception.py::test_no_bytes_are_taken_before_the_generation_says_what_they_are",
        "keeper/copies.py",
        "            if incoming is None or not self._knows_sealing(incoming):\n"
        '                raise ValueError("no such copy is being received")\n'
        "            if put",
        "            if incoming is None:\n"
        '                raise ValueError("no such copy is being received")\n'
        "            if put",
    ),
    Mutation(  # rebuilt before generation
        "keeper/test_copy_reception.py::test_no_bytes_are_taken_before_the_generation_says_what_they_are",
        "keeper/copies.py",
        "            if incoming is None or not self._knows_sealing(incoming):\n"
        '                raise ValueError("no such copy is being received")\n'
        "            incoming.num_active += 1\n"
        "        try",
        "            assert incoming is not None\n            incoming.num_active += 1\n        try",
    ),
    Mutation(  # finished in mid-range
        "keeper/test_copy_reception.py::test_a_copy_is_not_whole_while_a_range_is_on_the_way",
        "keeper/copies.py",
        " or incoming.num_active:",
        ":",
    ),
    Mutation(  # finished before generation
        "keeper/test_copy_reception.py::test_no_bytes_are_taken_before_the_generation_says_what_they_are",
        "keeper/copies.py",
        "            if incoming is None or not self._knows_sealing(incoming) or",
        "            if incoming is None or",
    ),
    Mutation(  # copy undigested
        "keeper/test_copies.py::test_a_slot_that_changed_after_it_was_sealed_becomes_no_copy",
        "keeper/copies.py",
        "        if damage is not None:",
        "        if not slot:",
    ),
    Mutation(  # damaged copy not freed
        "keeper/test_copies.py::test_a_slot_that_changed_after_it_was_sealed_becomes_no_copy",
        "keeper/copies.py",
        "            slot.advance(SlotRecord(SlotState.FREE))\n            return Damaged(damage)",
        "            return Damaged(damage)",
    ),
    Mutation(  # data of a copy undigested
        "keeper/test_copies.py::test_a_slot_that_changed_after_it_was_sealed_becomes_no_copy",
        "keeper/copies.py",
        "        if kind.hex(table) != digest:",
        "        if not digest:",
    ),
    Mutation(  # header of a copy uncompared
        "keeper/test_copy_reception.py::test_each_byte_that_changed_on_the_way_is_found",
        "keeper/copies.py",
        ".tobytes() != header:",
        '.tobytes() == b"":',
    ),
    Mutation(  # layout of a copy uncompared
        "keeper/test_copy_reception.py::test_a_copy_of_another_layout_than_the_manifest_says_is_refused",
        "keeper/copies.py",
        "        if (part.data_start, part.nbytes) != (layout.data_start, layout.nbytes):\n            return",
        "        if not layout.nbytes:\n            return",
    ),
    Mutation(  # copy of other bytes kept
        "keeper/test_copy_reception.py::test_a_copy_that_came_in_several_ranges_is_kept_and_not_wanted_again",
        "keeper/copies.py",
        " and digests == offer.digests",
        "",
    ),
    Mutation(  # files overlap
        "keeper/test_copies.py::test_offers_that_no_keeper_makes_are_refused",
        "keeper/copies.py",
        "        if part.start < end or part.data_start < 0",
        "        if part.data_start < 0",
    ),
    Mutation(  # file without digest
        "keeper/test_copies.py::test_offers_that_no_keeper_makes_are_refused",
        "keeper/copies.py",
        "    if len(offer.digests) != len(files) or end <= 0",
        "    if end <= 0",
    ),
    Mutation(  # dead reception stays
        "keeper/test_copy_reception.py::test_a_reception_that_no_connection_feeds_any_more_ends",
        "keeper/copies.py",
        "                if not each.num_active and time.monotonic() - each.touched_at > _DEAD_S:",
        "                if not each:",
    ),
    Mutation(  # fed reception ends
        "keeper/test_copy_reception.py::test_a_reception_that_no_connection_feeds_any_more_ends",
        "keeper/copies.py",
        "                if not each.num_active and time.monotonic()",
        "                if time.monotonic()",
    ),
    Mutation(  # dead ranks' copies stay
        "keeper/test_copy_reception.py::test_copies_that_are_owed_to_the_run_stay_and_others_make_way",
        "keeper/copies.py",
        "                elif (is_old or is_extra) and ",
        "                elif not slot and ",
    ),
    Mutation(  # copy removed while received
        "keeper/test_copy_reception.py::test_what_is_being_received_stays_though_it_looks_old",
        "keeper/copies.py",
        "                if name not in busy and slot.rank",
        "                if name not in self.being_sent and slot.rank",
    ),
    Mutation(  # copy given back while received
        "keeper/test_copy_reception.py::test_what_is_being_received_stays_though_it_looks_old",
        "keeper/copies.py",
        "                if name in busy or slot.rank",
        "                if name in self.being_sent or slot.rank",
    ),
    Mutation(  # owed copy filled anew
        "keeper/test_copy_reception.py::test_the_newest_protected_copy_is_not_filled_anew_nor_one_that_is_owed",
        "keeper/copies.py",
        "            if is_needed or not (is_old or is_one_too_many) or",
        "            if not (is_old or is_one_too_many) or",
    ),
    Mutation(  # newest protected copy filled anew
        "keeper/test_copy_reception.py::test_the_newest_protected_copy_is_not_filled_anew_nor_one_that_is_owed",
        "keeper/copies.py",
        "newest is not None and held.place < newest)\n            is_one",
        "newest is not None and held.place <= newest)\n            is_one",
    ),
    Mutation(  # busiest node not relieved
        "recovery/test_source_plan.py::test_no_move_of_a_file_off_the_busiest_node_ends_the_restore_sooner",
        "recovery/source_plan.py",
        "    while plan.relieve():\n        pass\n",
        "",
    ),
    Mutation(  # few holders not first
        "recovery/test_source_plan.py::test_no_node_has_to_send_more_than_it_must[fewest holders first]",
        "recovery/source_plan.py",
        "key=lambda file: (len(files[file].holders), -files[file].nbytes)",
        "key=lambda file: -files[file].nbytes",
    ),
    Mutation(  # large files not first
        "recovery/test_source_plan.py::test_no_node_has_to_send_more_than_it_must[large ones first]",
        "recovery/source_plan.py",
        "key=lambda file: (len(files[file].holders), -files[file].nbytes)",
        "key=lambda file: len(files[file].holders)",
    ),
    Mutation(  # nearness ignored
        "recovery/test_source_plan.py::test_a_file_in_the_memory_of_the_node_that_wrote_it_is_read_there",
        "recovery/source_plan.py",
        "(self._end_s(number, node), holders[node].distance)",
        "self._end_s(number, node)",
    ),
    Mutation(  # own memory counted
        "recovery/test_source_plan.py::test_a_file_in_the_memory_of_the_node_that_wrote_it_is_read_there",
        "recovery/source_plan.py",
        "self._busy_s.get(node, 0.0) + seconds if seconds else 0.0",
        "self._busy_s.get(node, 0.0) + seconds",
    ),
    Mutation(  # node memory costs network
        "recovery/test_source_plan.py::test_a_file_in_the_memory_of_the_node_that_wrote_it_is_read_there",
        "recovery/source_plan.py",
        "if tier in {Tier.LIVE_MEMORY, Tier.NODE_MEMORY}:",
        "if tier is Tier.LIVE_MEMORY:",
    ),
    Mutation(  # disk as fast as network
        "recovery/test_source_plan.py::test_a_disk_helps_a_peer_in_proportion_to_its_rate",
        "recovery/source_plan.py",
        "self.network if tier is Tier.PEER_MEMORY else self.disk",
        "self.network",
    ),
    Mutation(  # moved file still counted
        "recovery/test_source_plan.py::test_no_node_has_to_send_more_than_it_must[a file that moved is sent once]",
        "recovery/source_plan.py",
        "self._busy_s[busiest] = sum(self._seconds(each, busiest) for each in self._moved[busiest])",
        "pass",
    ),
    Mutation(  # moved file moved again
        "recovery/test_source_plan.py::test_no_node_has_to_send_more_than_it_must[a file that moved is sent once]",
        "recovery/source_plan.py",
        "                self._moved[busiest].remove(number)\n",
        "",
    ),
    Mutation(  # nodes without a part add to no sum
        "checkpointer/test_rebuild_plan.py::"
        "test_a_node_without_a_part_in_the_job_sends_its_slots_and_helps_to_rebuild_those_of_a_lost_one",
        "checkpointer/rebuild_plan.py",
        "plan_rebuild(left, {**nodes, **{share.node: share.adding() for share in away}})",
        "plan_rebuild(left, nodes)",
    ),
]
