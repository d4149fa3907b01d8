"""How plain types are read from messages, and written to them.

Made by scripts/generate_client_types.py from proto/.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from ctxcache.client import types
from ctxcache.client.wire_values import dtype, nanoseconds, span, state_kind, time
from ctxcache.format.model import ModelProbe
from ctxcache.format.streams import Content, StreamRange
from ctxcache.v1 import (
    admin_pb2,
    block_pb2,
    faults_pb2,
    hints_pb2,
    model_pb2,
    operations_pb2,
    prefix_pb2,
    recording_pb2,
    session_pb2,
)


def read_stream_range(message: model_pb2.StreamRange) -> StreamRange:
    return StreamRange(
        kind=state_kind(message.kind),
        layer_begin=message.layer_begin,
        layer_end=message.layer_end,
    )


def write_stream_range(plain: StreamRange) -> model_pb2.StreamRange:
    return model_pb2.StreamRange(
        kind=model_pb2.StateKind.ValueType(plain.kind),
        layer_begin=plain.layer_begin,
        layer_end=plain.layer_end,
    )


def read_content(message: session_pb2.ContentRange) -> Content:
    return Content(
        begin=message.begin,
        end=message.end,
        digest=message.digest,
    )


def write_content(plain: Content) -> session_pb2.ContentRange:
    return session_pb2.ContentRange(
        begin=plain.begin,
        end=plain.end,
        digest=plain.digest,
    )


def read_model_probe(message: model_pb2.ModelProbe) -> ModelProbe:
    return ModelProbe(
        dtype=dtype(message.dtype),
        token_ids=tuple(message.token_ids),
        group_size=message.group_size,
        values=message.values,
    )


def write_model_probe(plain: ModelProbe) -> model_pb2.ModelProbe:
    return model_pb2.ModelProbe(
        dtype=model_pb2.Dtype.ValueType(plain.dtype),
        token_ids=plain.token_ids,
        group_size=plain.group_size,
        values=plain.values,
    )


def read_block_part(message: block_pb2.BlockPart) -> types.BlockPart:
    return types.BlockPart(
        layer_begin=message.layer_begin,
        layer_end=message.layer_end,
        rank=message.rank,
    )


def write_block_part(plain: types.BlockPart) -> block_pb2.BlockPart:
    return block_pb2.BlockPart(
        layer_begin=plain.layer_begin,
        layer_end=plain.layer_end,
        rank=plain.rank,
    )


def read_block_space(message: block_pb2.BlockSpace) -> types.BlockSpace:
    return types.BlockSpace(
        model_fingerprint=message.model_fingerprint,
        layout_tag=message.layout_tag,
        salt=message.salt,
        parts=tuple([read_block_part(part) for part in message.parts]),
    )


def write_block_space(plain: types.BlockSpace) -> block_pb2.BlockSpace:
    return block_pb2.BlockSpace(
        model_fingerprint=plain.model_fingerprint,
        layout_tag=plain.layout_tag,
        salt=plain.salt,
        parts=[write_block_part(part) for part in plain.parts],
    )


def read_session_info(message: session_pb2.Session) -> types.SessionInfo:
    return types.SessionInfo(
        name=message.name,
        uid=message.uid,
        tenant=message.tenant,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        layout=tuple([read_stream_range(part) for part in message.layout]),
        generation=message.generation,
        token_count=message.token_count,
        durable_token_count=message.durable_token_count,
        create_time_ns=nanoseconds(message.create_time) if message.HasField("create_time") else None,
        access_time_ns=nanoseconds(message.access_time) if message.HasField("access_time") else None,
        expire_time_ns=nanoseconds(message.expire_time) if message.HasField("expire_time") else None,
        ttl_ns=nanoseconds(message.ttl) if message.HasField("ttl") else None,
        is_pinned=message.is_pinned,
        dram_bytes=message.dram_bytes,
        ssd_bytes=message.ssd_bytes,
        salt=message.salt,
        contents=tuple([read_content(part) for part in message.contents]),
        whole_token_count=message.whole_token_count,
        copies=message.copies,
        labels=dict(message.labels),
        is_being_appended=message.is_being_appended,
    )


def write_session_info(plain: types.SessionInfo) -> session_pb2.Session:
    return session_pb2.Session(
        name=plain.name,
        uid=plain.uid,
        tenant=plain.tenant,
        model=plain.model,
        model_fingerprint=plain.model_fingerprint,
        layout=[write_stream_range(part) for part in plain.layout],
        generation=plain.generation,
        token_count=plain.token_count,
        durable_token_count=plain.durable_token_count,
        create_time=None if plain.create_time_ns is None else time(plain.create_time_ns),
        access_time=None if plain.access_time_ns is None else time(plain.access_time_ns),
        expire_time=None if plain.expire_time_ns is None else time(plain.expire_time_ns),
        ttl=None if plain.ttl_ns is None else span(plain.ttl_ns),
        is_pinned=plain.is_pinned,
        dram_bytes=plain.dram_bytes,
        ssd_bytes=plain.ssd_bytes,
        salt=plain.salt,
        contents=[write_content(part) for part in plain.contents],
        whole_token_count=plain.whole_token_count,
        copies=plain.copies,
        labels=plain.labels,
        is_being_appended=plain.is_being_appended,
    )


def read_layer_range(message: session_pb2.LayerRange) -> types.LayerRange:
    return types.LayerRange(
        begin=message.begin,
        end=message.end,
    )


def write_layer_range(plain: types.LayerRange) -> session_pb2.LayerRange:
    return session_pb2.LayerRange(
        begin=plain.begin,
        end=plain.end,
    )


def read_kind_availability(message: session_pb2.KindAvailability) -> types.KindAvailability:
    return types.KindAvailability(
        kind=state_kind(message.kind),
        layers=tuple([read_layer_range(part) for part in message.layers]),
        size_bytes=message.size_bytes,
    )


def write_kind_availability(plain: types.KindAvailability) -> session_pb2.KindAvailability:
    return session_pb2.KindAvailability(
        kind=model_pb2.StateKind.ValueType(plain.kind),
        layers=[write_layer_range(part) for part in plain.layers],
        size_bytes=plain.size_bytes,
    )


def read_lookup_result(message: session_pb2.LookupResult) -> types.LookupResult:
    return types.LookupResult(
        name=message.name,
        state=types.LookupState(message.state),
        reason=message.reason,
        generation=message.generation,
        token_count=message.token_count,
        dram_token_count=message.dram_token_count,
        kinds=tuple([read_kind_availability(part) for part in message.kinds]),
        expire_time_ns=nanoseconds(message.expire_time) if message.HasField("expire_time") else None,
    )


def write_lookup_result(plain: types.LookupResult) -> session_pb2.LookupResult:
    return session_pb2.LookupResult(
        name=plain.name,
        state=session_pb2.LookupState.ValueType(plain.state),
        reason=plain.reason,
        generation=plain.generation,
        token_count=plain.token_count,
        dram_token_count=plain.dram_token_count,
        kinds=[write_kind_availability(part) for part in plain.kinds],
        expire_time=None if plain.expire_time_ns is None else time(plain.expire_time_ns),
    )


def read_shared_prefix(message: prefix_pb2.SharedPrefix) -> types.SharedPrefix:
    return types.SharedPrefix(
        session=message.session,
        key=message.key,
        token_count=message.token_count,
        session_count=message.session_count,
        saved_bytes=message.saved_bytes,
    )


def write_shared_prefix(plain: types.SharedPrefix) -> prefix_pb2.SharedPrefix:
    return prefix_pb2.SharedPrefix(
        session=plain.session,
        key=plain.key,
        token_count=plain.token_count,
        session_count=plain.session_count,
        saved_bytes=plain.saved_bytes,
    )


def read_prefix_match(message: prefix_pb2.MatchPrefixResponse) -> types.PrefixMatch:
    return types.PrefixMatch(
        state=types.LookupState(message.state),
        token_count=message.token_count,
        dram_token_count=message.dram_token_count,
        reason=message.reason,
        lease_token=message.lease_token,
        lease_expire_time_ns=nanoseconds(message.lease_expire_time)
        if message.HasField("lease_expire_time")
        else None,
        ready_in_ns=nanoseconds(message.ready_in) if message.HasField("ready_in") else None,
    )


def write_prefix_match(plain: types.PrefixMatch) -> prefix_pb2.MatchPrefixResponse:
    return prefix_pb2.MatchPrefixResponse(
        state=session_pb2.LookupState.ValueType(plain.state),
        token_count=plain.token_count,
        dram_token_count=plain.dram_token_count,
        reason=plain.reason,
        lease_token=plain.lease_token,
        lease_expire_time=None if plain.lease_expire_time_ns is None else time(plain.lease_expire_time_ns),
        ready_in=None if plain.ready_in_ns is None else span(plain.ready_in_ns),
    )


def read_stored_streams(message: model_pb2.StreamSpec) -> types.StoredStreams:
    return types.StoredStreams(
        streams=read_stream_range(message.streams),
        row_bytes=message.row_bytes,
        dtype=dtype(message.dtype),
    )


def write_stored_streams(plain: types.StoredStreams) -> model_pb2.StreamSpec:
    return model_pb2.StreamSpec(
        streams=write_stream_range(plain.streams),
        row_bytes=plain.row_bytes,
        dtype=model_pb2.Dtype.ValueType(plain.dtype),
    )


def read_model_info(message: model_pb2.Model) -> types.ModelInfo:
    return types.ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        architecture=message.architecture,
        revision=message.revision,
        weights_digest=message.weights_digest,
        tokenizer_digest=message.tokenizer_digest,
        dtype=dtype(message.dtype),
        layer_count=message.layer_count,
        hidden_size=message.hidden_size,
        kv_head_count=message.kv_head_count,
        head_size=message.head_size,
        rope=message.rope,
        norm=message.norm,
        is_relocatable=message.is_relocatable,
        streams=tuple([read_stored_streams(part) for part in message.streams]),
        create_time_ns=nanoseconds(message.create_time) if message.HasField("create_time") else None,
        settings=message.settings,
        probe=read_model_probe(message.probe) if message.HasField("probe") else None,
    )


def write_model_info(plain: types.ModelInfo) -> model_pb2.Model:
    return model_pb2.Model(
        name=plain.name,
        fingerprint=plain.fingerprint,
        architecture=plain.architecture,
        revision=plain.revision,
        weights_digest=plain.weights_digest,
        tokenizer_digest=plain.tokenizer_digest,
        dtype=model_pb2.Dtype.ValueType(plain.dtype),
        layer_count=plain.layer_count,
        hidden_size=plain.hidden_size,
        kv_head_count=plain.kv_head_count,
        head_size=plain.head_size,
        rope=plain.rope,
        norm=plain.norm,
        is_relocatable=plain.is_relocatable,
        streams=[write_stored_streams(part) for part in plain.streams],
        create_time=None if plain.create_time_ns is None else time(plain.create_time_ns),
        settings=plain.settings,
        probe=None if plain.probe is None else write_model_probe(plain.probe),
    )


def read_forgotten(message: model_pb2.ForgetModelResponse) -> types.Forgotten:
    return types.Forgotten(
        models=tuple(message.models),
        session_count=message.session_count,
        token_count=message.token_count,
        block_count=message.block_count,
    )


def write_forgotten(plain: types.Forgotten) -> model_pb2.ForgetModelResponse:
    return model_pb2.ForgetModelResponse(
        models=plain.models,
        session_count=plain.session_count,
        token_count=plain.token_count,
        block_count=plain.block_count,
    )


def read_hint_result(message: hints_pb2.HintResult) -> types.HintResult:
    return types.HintResult(
        action_id=message.action_id,
        outcome=types.HintOutcome(message.outcome),
        reason=message.reason,
        granted_bytes=message.granted_bytes,
        valid_until_ns=nanoseconds(message.valid_until) if message.HasField("valid_until") else None,
    )


def write_hint_result(plain: types.HintResult) -> hints_pb2.HintResult:
    return hints_pb2.HintResult(
        action_id=plain.action_id,
        outcome=hints_pb2.HintOutcome.ValueType(plain.outcome),
        reason=plain.reason,
        granted_bytes=plain.granted_bytes,
        valid_until=None if plain.valid_until_ns is None else time(plain.valid_until_ns),
    )


def read_layer_readiness(message: hints_pb2.LayerReadiness) -> types.LayerReadiness:
    return types.LayerReadiness(
        layer_begin=message.layer_begin,
        layer_end=message.layer_end,
        state=types.LayerPlace(message.state),
    )


def write_layer_readiness(plain: types.LayerReadiness) -> hints_pb2.LayerReadiness:
    return hints_pb2.LayerReadiness(
        layer_begin=plain.layer_begin,
        layer_end=plain.layer_end,
        state=hints_pb2.LayerState.ValueType(plain.state),
    )


def read_session_readiness(message: hints_pb2.Readiness) -> types.SessionReadiness:
    return types.SessionReadiness(
        token_count=message.token_count,
        layers=tuple([read_layer_readiness(part) for part in message.layers]),
        missing_bytes=message.missing_bytes,
        ready_in_ns=nanoseconds(message.ready_in) if message.HasField("ready_in") else None,
    )


def write_session_readiness(plain: types.SessionReadiness) -> hints_pb2.Readiness:
    return hints_pb2.Readiness(
        token_count=plain.token_count,
        layers=[write_layer_readiness(part) for part in plain.layers],
        missing_bytes=plain.missing_bytes,
        ready_in=None if plain.ready_in_ns is None else span(plain.ready_in_ns),
    )


def read_session_event(message: hints_pb2.SessionEvent) -> types.SessionEvent:
    return types.SessionEvent(
        session=message.session,
        changes=tuple([types.SessionChange(part) for part in message.changes]),
        readiness=read_session_readiness(message.readiness) if message.HasField("readiness") else None,
    )


def write_session_event(plain: types.SessionEvent) -> hints_pb2.SessionEvent:
    return hints_pb2.SessionEvent(
        session=plain.session,
        changes=[hints_pb2.SessionChange.ValueType(part) for part in plain.changes],
        readiness=None if plain.readiness is None else write_session_readiness(plain.readiness),
    )


def read_tier_stats(message: admin_pb2.TierStats) -> types.TierStats:
    return types.TierStats(
        tier=types.StorageTier(message.tier),
        path=message.path,
        capacity_bytes=message.capacity_bytes,
        used_bytes=message.used_bytes,
        segment_count=message.segment_count,
        state=types.PathState(message.state),
        problem=message.problem,
        largest_free_bytes=message.largest_free_bytes,
        written_bytes=message.written_bytes,
    )


def write_tier_stats(plain: types.TierStats) -> admin_pb2.TierStats:
    return admin_pb2.TierStats(
        tier=session_pb2.Tier.ValueType(plain.tier),
        path=plain.path,
        capacity_bytes=plain.capacity_bytes,
        used_bytes=plain.used_bytes,
        segment_count=plain.segment_count,
        state=admin_pb2.PathState.ValueType(plain.state),
        problem=plain.problem,
        largest_free_bytes=plain.largest_free_bytes,
        written_bytes=plain.written_bytes,
    )


def read_store_stats(message: admin_pb2.Stats) -> types.StoreStats:
    return types.StoreStats(
        version=message.version,
        start_time_ns=nanoseconds(message.start_time) if message.HasField("start_time") else None,
        data_directory=message.data_directory,
        listen_addresses=tuple(message.listen_addresses),
        session_count=message.session_count,
        model_count=message.model_count,
        segment_count=message.segment_count,
        lease_count=message.lease_count,
        reservation_count=message.reservation_count,
        tiers=tuple([read_tier_stats(part) for part in message.tiers]),
        appended_token_count=message.appended_token_count,
        read_token_count=message.read_token_count,
        dram_hit_token_count=message.dram_hit_token_count,
        expired_session_count=message.expired_session_count,
        evicted_session_count=message.evicted_session_count,
        corrupt_segment_count=message.corrupt_segment_count,
        flushed_segment_count=message.flushed_segment_count,
        promoted_segment_count=message.promoted_segment_count,
        arena_prefaulted_bytes=message.arena_prefaulted_bytes,
        quarantined_slot_count=message.quarantined_slot_count,
        quarantined_bytes=message.quarantined_bytes,
        dirty_bytes=message.dirty_bytes,
        delayed_write_count=message.delayed_write_count,
        prefetched_segment_count=message.prefetched_segment_count,
        prefetch_used_segment_count=message.prefetch_used_segment_count,
        prefetch_unused_segment_count=message.prefetch_unused_segment_count,
        prefetch_late_segment_count=message.prefetch_late_segment_count,
        unadmitted_session_count=message.unadmitted_session_count,
        spared_bytes=message.spared_bytes,
        mended_segment_count=message.mended_segment_count,
        mended_copy_count=message.mended_copy_count,
        uncopied_segment_count=message.uncopied_segment_count,
        single_copy_segment_count=message.single_copy_segment_count,
        joined_segment_count=message.joined_segment_count,
        saved_prefill_seconds=message.saved_prefill_seconds,
        saved_dollars=message.saved_dollars if message.HasField("saved_dollars") else None,
    )


def write_store_stats(plain: types.StoreStats) -> admin_pb2.Stats:
    return admin_pb2.Stats(
        version=plain.version,
        start_time=None if plain.start_time_ns is None else time(plain.start_time_ns),
        data_directory=plain.data_directory,
        listen_addresses=plain.listen_addresses,
        session_count=plain.session_count,
        model_count=plain.model_count,
        segment_count=plain.segment_count,
        lease_count=plain.lease_count,
        reservation_count=plain.reservation_count,
        tiers=[write_tier_stats(part) for part in plain.tiers],
        appended_token_count=plain.appended_token_count,
        read_token_count=plain.read_token_count,
        dram_hit_token_count=plain.dram_hit_token_count,
        expired_session_count=plain.expired_session_count,
        evicted_session_count=plain.evicted_session_count,
        corrupt_segment_count=plain.corrupt_segment_count,
        flushed_segment_count=plain.flushed_segment_count,
        promoted_segment_count=plain.promoted_segment_count,
        arena_prefaulted_bytes=plain.arena_prefaulted_bytes,
        quarantined_slot_count=plain.quarantined_slot_count,
        quarantined_bytes=plain.quarantined_bytes,
        dirty_bytes=plain.dirty_bytes,
        delayed_write_count=plain.delayed_write_count,
        prefetched_segment_count=plain.prefetched_segment_count,
        prefetch_used_segment_count=plain.prefetch_used_segment_count,
        prefetch_unused_segment_count=plain.prefetch_unused_segment_count,
        prefetch_late_segment_count=plain.prefetch_late_segment_count,
        unadmitted_session_count=plain.unadmitted_session_count,
        spared_bytes=plain.spared_bytes,
        mended_segment_count=plain.mended_segment_count,
        mended_copy_count=plain.mended_copy_count,
        uncopied_segment_count=plain.uncopied_segment_count,
        single_copy_segment_count=plain.single_copy_segment_count,
        joined_segment_count=plain.joined_segment_count,
        saved_prefill_seconds=plain.saved_prefill_seconds,
        saved_dollars=plain.saved_dollars,
    )


def read_tenant_stats(message: admin_pb2.TenantUse) -> types.TenantStats:
    return types.TenantStats(
        tenant=message.tenant,
        session_count=message.session_count,
        dram_bytes=message.dram_bytes,
        ssd_bytes=message.ssd_bytes,
        kept_bytes=message.kept_bytes,
        guaranteed_dram_bytes=message.guaranteed_dram_bytes,
        guaranteed_ssd_bytes=message.guaranteed_ssd_bytes,
        limit_bytes=message.limit_bytes if message.HasField("limit_bytes") else None,
        retained_bytes=message.retained_bytes,
        pinned_bytes=message.pinned_bytes,
        read_token_count=message.read_token_count,
        appended_token_count=message.appended_token_count,
    )


def write_tenant_stats(plain: types.TenantStats) -> admin_pb2.TenantUse:
    return admin_pb2.TenantUse(
        tenant=plain.tenant,
        session_count=plain.session_count,
        dram_bytes=plain.dram_bytes,
        ssd_bytes=plain.ssd_bytes,
        kept_bytes=plain.kept_bytes,
        guaranteed_dram_bytes=plain.guaranteed_dram_bytes,
        guaranteed_ssd_bytes=plain.guaranteed_ssd_bytes,
        limit_bytes=plain.limit_bytes,
        retained_bytes=plain.retained_bytes,
        pinned_bytes=plain.pinned_bytes,
        read_token_count=plain.read_token_count,
        appended_token_count=plain.appended_token_count,
    )


def read_session_happening(message: admin_pb2.SessionHappening) -> types.SessionHappening:
    return types.SessionHappening(
        event=types.MissEvent(message.event),
        first_time_ns=nanoseconds(message.first_time) if message.HasField("first_time") else None,
        last_time_ns=nanoseconds(message.last_time) if message.HasField("last_time") else None,
        count=message.count,
        detail=message.detail,
        token_count=message.token_count,
        trace_id=message.trace_id,
    )


def write_session_happening(plain: types.SessionHappening) -> admin_pb2.SessionHappening:
    return admin_pb2.SessionHappening(
        event=admin_pb2.MissEvent.ValueType(plain.event),
        first_time=None if plain.first_time_ns is None else time(plain.first_time_ns),
        last_time=None if plain.last_time_ns is None else time(plain.last_time_ns),
        count=plain.count,
        detail=plain.detail,
        token_count=plain.token_count,
        trace_id=plain.trace_id,
    )


def read_request_miss(message: admin_pb2.RequestMiss) -> types.RequestMiss:
    return types.RequestMiss(
        session=message.session,
        access=message.access,
        result=message.result,
        time_ns=nanoseconds(message.time) if message.HasField("time") else None,
        count=message.count,
    )


def write_request_miss(plain: types.RequestMiss) -> admin_pb2.RequestMiss:
    return admin_pb2.RequestMiss(
        session=plain.session,
        access=plain.access,
        result=plain.result,
        time=None if plain.time_ns is None else time(plain.time_ns),
        count=plain.count,
    )


def read_miss_report(message: admin_pb2.WhyMissResponse) -> types.MissReport:
    return types.MissReport(
        name=message.name,
        tenant=message.tenant,
        is_there=message.is_there,
        token_count=message.token_count,
        durable_token_count=message.durable_token_count,
        reason=types.MissEvent(message.reason),
        happenings=tuple([read_session_happening(part) for part in message.happenings]),
        remembered_since_ns=nanoseconds(message.remembered_since)
        if message.HasField("remembered_since")
        else None,
        trace_id=message.trace_id,
        misses=tuple([read_request_miss(part) for part in message.misses]),
        withheld_token_count=message.withheld_token_count,
        lost_paths=tuple(message.lost_paths),
    )


def write_miss_report(plain: types.MissReport) -> admin_pb2.WhyMissResponse:
    return admin_pb2.WhyMissResponse(
        name=plain.name,
        tenant=plain.tenant,
        is_there=plain.is_there,
        token_count=plain.token_count,
        durable_token_count=plain.durable_token_count,
        reason=admin_pb2.MissEvent.ValueType(plain.reason),
        happenings=[write_session_happening(part) for part in plain.happenings],
        remembered_since=None if plain.remembered_since_ns is None else time(plain.remembered_since_ns),
        trace_id=plain.trace_id,
        misses=[write_request_miss(part) for part in plain.misses],
        withheld_token_count=plain.withheld_token_count,
        lost_paths=plain.lost_paths,
    )


def read_setting_value(message: admin_pb2.Setting) -> types.SettingValue:
    return types.SettingValue(
        name=message.name,
        value_json=message.value_json,
        can_reload=message.can_reload,
    )


def write_setting_value(plain: types.SettingValue) -> admin_pb2.Setting:
    return admin_pb2.Setting(
        name=plain.name,
        value_json=plain.value_json,
        can_reload=plain.can_reload,
    )


def read_settings_reload(message: admin_pb2.ReloadSettingsResponse) -> types.SettingsReload:
    return types.SettingsReload(
        changed=tuple(message.changed),
        pending=tuple(message.pending),
    )


def write_settings_reload(plain: types.SettingsReload) -> admin_pb2.ReloadSettingsResponse:
    return admin_pb2.ReloadSettingsResponse(
        changed=plain.changed,
        pending=plain.pending,
    )


def read_bad_segment(message: admin_pb2.BadSegment) -> types.BadSegment:
    return types.BadSegment(
        segment_id=message.segment_id,
        tenant=message.tenant,
        sessions=tuple(message.sessions),
        position_begin=message.position_begin,
        position_end=message.position_end,
        path=message.path,
        offset_bytes=message.offset_bytes,
        problem=message.problem,
        tier=types.StorageTier(message.tier),
        is_mended=message.is_mended,
    )


def write_bad_segment(plain: types.BadSegment) -> admin_pb2.BadSegment:
    return admin_pb2.BadSegment(
        segment_id=plain.segment_id,
        tenant=plain.tenant,
        sessions=plain.sessions,
        position_begin=plain.position_begin,
        position_end=plain.position_end,
        path=plain.path,
        offset_bytes=plain.offset_bytes,
        problem=plain.problem,
        tier=session_pb2.Tier.ValueType(plain.tier),
        is_mended=plain.is_mended,
    )


def read_verify_progress(message: admin_pb2.VerifyResponse) -> types.VerifyProgress:
    return types.VerifyProgress(
        segment_count=message.segment_count,
        checked_segment_count=message.checked_segment_count,
        checked_bytes=message.checked_bytes,
        record_count=message.record_count,
        bad=tuple([read_bad_segment(part) for part in message.bad]),
        released_slot_count=message.released_slot_count,
    )


def write_verify_progress(plain: types.VerifyProgress) -> admin_pb2.VerifyResponse:
    return admin_pb2.VerifyResponse(
        segment_count=plain.segment_count,
        checked_segment_count=plain.checked_segment_count,
        checked_bytes=plain.checked_bytes,
        record_count=plain.record_count,
        bad=[write_bad_segment(part) for part in plain.bad],
        released_slot_count=plain.released_slot_count,
    )


def read_held_lease(message: operations_pb2.HeldLease) -> types.HeldLease:
    return types.HeldLease(
        lease_id=message.lease_id,
        tenant=message.tenant,
        session=message.session,
        token_begin=message.token_begin,
        token_end=message.token_end,
        pinned_bytes=message.pinned_bytes,
        client=message.client if message.HasField("client") else None,
        age_ns=nanoseconds(message.age) if message.HasField("age") else None,
        expire_time_ns=nanoseconds(message.expire_time) if message.HasField("expire_time") else None,
    )


def write_held_lease(plain: types.HeldLease) -> operations_pb2.HeldLease:
    return operations_pb2.HeldLease(
        lease_id=plain.lease_id,
        tenant=plain.tenant,
        session=plain.session,
        token_begin=plain.token_begin,
        token_end=plain.token_end,
        pinned_bytes=plain.pinned_bytes,
        client=plain.client,
        age=None if plain.age_ns is None else span(plain.age_ns),
        expire_time=None if plain.expire_time_ns is None else time(plain.expire_time_ns),
    )


def read_drain_status(message: operations_pb2.DrainStatus) -> types.DrainStatus:
    return types.DrainStatus(
        running_rpc_count=message.running_rpc_count,
        local_client_count=message.local_client_count,
        lease_count=message.lease_count,
        reservation_count=message.reservation_count,
        dirty_bytes=message.dirty_bytes,
        spared_bytes=message.spared_bytes,
        problem=message.problem,
        is_done=message.is_done,
    )


def write_drain_status(plain: types.DrainStatus) -> operations_pb2.DrainStatus:
    return operations_pb2.DrainStatus(
        running_rpc_count=plain.running_rpc_count,
        local_client_count=plain.local_client_count,
        lease_count=plain.lease_count,
        reservation_count=plain.reservation_count,
        dirty_bytes=plain.dirty_bytes,
        spared_bytes=plain.spared_bytes,
        problem=plain.problem,
        is_done=plain.is_done,
    )


def read_engine_use(message: operations_pb2.EngineUse) -> types.EngineUse:
    return types.EngineUse(
        tenant=message.tenant,
        engine=message.engine,
        waiting_count=message.waiting_count,
        session_count=message.session_count,
        is_connected=message.is_connected,
    )


def write_engine_use(plain: types.EngineUse) -> operations_pb2.EngineUse:
    return operations_pb2.EngineUse(
        tenant=plain.tenant,
        engine=plain.engine,
        waiting_count=plain.waiting_count,
        session_count=plain.session_count,
        is_connected=plain.is_connected,
    )


def read_fleet_node(message: operations_pb2.FleetNode) -> types.FleetNode:
    return types.FleetNode(
        node=message.node,
        address=message.address,
        beat=message.beat,
        is_self=message.is_self,
        taken_session_count=message.taken_session_count,
        is_answering=message.is_answering,
        problem=message.problem,
    )


def write_fleet_node(plain: types.FleetNode) -> operations_pb2.FleetNode:
    return operations_pb2.FleetNode(
        node=plain.node,
        address=plain.address,
        beat=plain.beat,
        is_self=plain.is_self,
        taken_session_count=plain.taken_session_count,
        is_answering=plain.is_answering,
        problem=plain.problem,
    )


def read_fleet_view(message: operations_pb2.Fleet) -> types.FleetView:
    return types.FleetView(
        node=message.node,
        bucket=message.bucket,
        is_sure=message.is_sure,
        problem=message.problem,
        private_session_count=message.private_session_count,
        owned_session_count=message.owned_session_count,
        unsure_session_count=message.unsure_session_count,
        guest_count=message.guest_count,
        arrived_session_count=message.arrived_session_count,
        arrived_token_count=message.arrived_token_count,
        arrived_bytes=message.arrived_bytes,
        yielded_session_count=message.yielded_session_count,
        superseded_session_count=message.superseded_session_count,
        owner_lost_count=message.owner_lost_count,
        head_read_count=message.head_read_count,
        head_change_count=message.head_change_count,
        no_answer_count=message.no_answer_count,
        nodes=tuple([read_fleet_node(part) for part in message.nodes]),
        restored_session_count=message.restored_session_count,
        shared_object_count=message.shared_object_count,
        shared_bytes=message.shared_bytes,
        unshared_session_count=message.unshared_session_count,
        share_failure_count=message.share_failure_count,
        removed_object_count=message.removed_object_count,
        borrowed_prefix_count=message.borrowed_prefix_count,
        borrowed_token_count=message.borrowed_token_count,
        lent_prefix_count=message.lent_prefix_count,
        told_prefix_count=message.told_prefix_count,
    )


def write_fleet_view(plain: types.FleetView) -> operations_pb2.Fleet:
    return operations_pb2.Fleet(
        node=plain.node,
        bucket=plain.bucket,
        is_sure=plain.is_sure,
        problem=plain.problem,
        private_session_count=plain.private_session_count,
        owned_session_count=plain.owned_session_count,
        unsure_session_count=plain.unsure_session_count,
        guest_count=plain.guest_count,
        arrived_session_count=plain.arrived_session_count,
        arrived_token_count=plain.arrived_token_count,
        arrived_bytes=plain.arrived_bytes,
        yielded_session_count=plain.yielded_session_count,
        superseded_session_count=plain.superseded_session_count,
        owner_lost_count=plain.owner_lost_count,
        head_read_count=plain.head_read_count,
        head_change_count=plain.head_change_count,
        no_answer_count=plain.no_answer_count,
        nodes=[write_fleet_node(part) for part in plain.nodes],
        restored_session_count=plain.restored_session_count,
        shared_object_count=plain.shared_object_count,
        shared_bytes=plain.shared_bytes,
        unshared_session_count=plain.unshared_session_count,
        share_failure_count=plain.share_failure_count,
        removed_object_count=plain.removed_object_count,
        borrowed_prefix_count=plain.borrowed_prefix_count,
        borrowed_token_count=plain.borrowed_token_count,
        lent_prefix_count=plain.lent_prefix_count,
        told_prefix_count=plain.told_prefix_count,
    )


def read_collected_fleet(message: operations_pb2.CollectFleetResponse) -> types.CollectedFleet:
    return types.CollectedFleet(
        shared_session_count=message.shared_session_count,
        object_count=message.object_count,
        size_bytes=message.size_bytes,
        garbage_object_count=message.garbage_object_count,
        garbage_bytes=message.garbage_bytes,
        expired_session_count=message.expired_session_count,
        busy_session_count=message.busy_session_count,
        problems=tuple(message.problems),
        done_percent=message.done_percent,
        dead_head_count=message.dead_head_count,
        away_store_count=message.away_store_count,
    )


def write_collected_fleet(plain: types.CollectedFleet) -> operations_pb2.CollectFleetResponse:
    return operations_pb2.CollectFleetResponse(
        shared_session_count=plain.shared_session_count,
        object_count=plain.object_count,
        size_bytes=plain.size_bytes,
        garbage_object_count=plain.garbage_object_count,
        garbage_bytes=plain.garbage_bytes,
        expired_session_count=plain.expired_session_count,
        busy_session_count=plain.busy_session_count,
        problems=plain.problems,
        done_percent=plain.done_percent,
        dead_head_count=plain.dead_head_count,
        away_store_count=plain.away_store_count,
    )


def read_published_sessions(message: operations_pb2.PublishSessionsResponse) -> types.PublishedSessions:
    return types.PublishedSessions(
        session_count=message.session_count,
        done_count=message.done_count,
        published_count=message.published_count,
        elsewhere_count=message.elsewhere_count,
        failed_count=message.failed_count,
        problem=message.problem,
    )


def write_published_sessions(plain: types.PublishedSessions) -> operations_pb2.PublishSessionsResponse:
    return operations_pb2.PublishSessionsResponse(
        session_count=plain.session_count,
        done_count=plain.done_count,
        published_count=plain.published_count,
        elsewhere_count=plain.elsewhere_count,
        failed_count=plain.failed_count,
        problem=plain.problem,
    )


def read_method_activity(message: operations_pb2.MethodActivity) -> types.MethodActivity:
    return types.MethodActivity(
        method=message.method,
        count=message.count,
        failed_count=message.failed_count,
        total_seconds=message.total_seconds,
        bounds_seconds=tuple(message.bounds_seconds),
        bucket_counts=tuple(message.bucket_counts),
    )


def write_method_activity(plain: types.MethodActivity) -> operations_pb2.MethodActivity:
    return operations_pb2.MethodActivity(
        method=plain.method,
        count=plain.count,
        failed_count=plain.failed_count,
        total_seconds=plain.total_seconds,
        bounds_seconds=plain.bounds_seconds,
        bucket_counts=plain.bucket_counts,
    )


def read_session_activity(message: operations_pb2.SessionActivity) -> types.SessionActivity:
    return types.SessionActivity(
        name=message.name,
        tenant=message.tenant,
        access_count=message.access_count,
        token_count=message.token_count,
        dram_bytes=message.dram_bytes,
        ssd_bytes=message.ssd_bytes,
    )


def write_session_activity(plain: types.SessionActivity) -> operations_pb2.SessionActivity:
    return operations_pb2.SessionActivity(
        name=plain.name,
        tenant=plain.tenant,
        access_count=plain.access_count,
        token_count=plain.token_count,
        dram_bytes=plain.dram_bytes,
        ssd_bytes=plain.ssd_bytes,
    )


def read_tenant_activity(message: operations_pb2.TenantActivity) -> types.TenantActivity:
    return types.TenantActivity(
        tenant=message.tenant,
        access_count=message.access_count,
        session_count=message.session_count,
        dram_bytes=message.dram_bytes,
        ssd_bytes=message.ssd_bytes,
    )


def write_tenant_activity(plain: types.TenantActivity) -> operations_pb2.TenantActivity:
    return operations_pb2.TenantActivity(
        tenant=plain.tenant,
        access_count=plain.access_count,
        session_count=plain.session_count,
        dram_bytes=plain.dram_bytes,
        ssd_bytes=plain.ssd_bytes,
    )


def read_activity(message: operations_pb2.Activity) -> types.Activity:
    return types.Activity(
        time_ns=nanoseconds(message.time) if message.HasField("time") else None,
        is_ready=message.is_ready,
        methods=tuple([read_method_activity(part) for part in message.methods]),
        sessions=tuple([read_session_activity(part) for part in message.sessions]),
        tenants=tuple([read_tenant_activity(part) for part in message.tenants]),
        oldest_lease_age_ns=nanoseconds(message.oldest_lease_age)
        if message.HasField("oldest_lease_age")
        else None,
        leased_bytes=message.leased_bytes,
        leased_limit_bytes=message.leased_limit_bytes,
        oldest_dirty_age_ns=nanoseconds(message.oldest_dirty_age)
        if message.HasField("oldest_dirty_age")
        else None,
        dirty_limit_bytes=message.dirty_limit_bytes,
        hit_count=message.hit_count,
        miss_count=message.miss_count,
        refused_rpc_count=message.refused_rpc_count,
        problems=tuple(message.problems),
    )


def write_activity(plain: types.Activity) -> operations_pb2.Activity:
    return operations_pb2.Activity(
        time=None if plain.time_ns is None else time(plain.time_ns),
        is_ready=plain.is_ready,
        methods=[write_method_activity(part) for part in plain.methods],
        sessions=[write_session_activity(part) for part in plain.sessions],
        tenants=[write_tenant_activity(part) for part in plain.tenants],
        oldest_lease_age=None if plain.oldest_lease_age_ns is None else span(plain.oldest_lease_age_ns),
        leased_bytes=plain.leased_bytes,
        leased_limit_bytes=plain.leased_limit_bytes,
        oldest_dirty_age=None if plain.oldest_dirty_age_ns is None else span(plain.oldest_dirty_age_ns),
        dirty_limit_bytes=plain.dirty_limit_bytes,
        hit_count=plain.hit_count,
        miss_count=plain.miss_count,
        refused_rpc_count=plain.refused_rpc_count,
        problems=plain.problems,
    )


def read_backup_part(message: operations_pb2.BackupResponse) -> types.BackupPart:
    return types.BackupPart(
        data=message.data,
        session_count=message.session_count,
        total_session_count=message.total_session_count,
        copied_bytes=message.copied_bytes,
        total_bytes=message.total_bytes,
        segment_count=message.segment_count,
        token_count=message.token_count,
        unwritten_token_count=message.unwritten_token_count,
        left_out_session_count=message.left_out_session_count,
    )


def write_backup_part(plain: types.BackupPart) -> operations_pb2.BackupResponse:
    return operations_pb2.BackupResponse(
        data=plain.data,
        session_count=plain.session_count,
        total_session_count=plain.total_session_count,
        copied_bytes=plain.copied_bytes,
        total_bytes=plain.total_bytes,
        segment_count=plain.segment_count,
        token_count=plain.token_count,
        unwritten_token_count=plain.unwritten_token_count,
        left_out_session_count=plain.left_out_session_count,
    )


def read_injected_fault(message: faults_pb2.Fault) -> types.InjectedFault:
    return types.InjectedFault(
        fault_id=message.fault_id,
        kind=types.InjectedFaultKind(message.kind),
        path=message.path,
        delay_ns=nanoseconds(message.delay) if message.HasField("delay") else None,
        error_number=message.error_number,
        left_count=message.left_count,
        left_duration_ns=nanoseconds(message.left_duration) if message.HasField("left_duration") else None,
    )


def write_injected_fault(plain: types.InjectedFault) -> faults_pb2.Fault:
    return faults_pb2.Fault(
        fault_id=plain.fault_id,
        kind=faults_pb2.FaultKind.ValueType(plain.kind),
        path=plain.path,
        delay=None if plain.delay_ns is None else span(plain.delay_ns),
        error_number=plain.error_number,
        left_count=plain.left_count,
        left_duration=None if plain.left_duration_ns is None else span(plain.left_duration_ns),
    )


def read_recorded_store(message: recording_pb2.RecordedStore) -> types.RecordedStore:
    return types.RecordedStore(
        version=message.version,
        start_time_ns=nanoseconds(message.start_time) if message.HasField("start_time") else None,
        dram_bytes=message.dram_bytes,
        ssd_bytes=message.ssd_bytes,
        session_count=message.session_count,
        placement_policy=message.placement_policy,
    )


def write_recorded_store(plain: types.RecordedStore) -> recording_pb2.RecordedStore:
    return recording_pb2.RecordedStore(
        version=plain.version,
        start_time=None if plain.start_time_ns is None else time(plain.start_time_ns),
        dram_bytes=plain.dram_bytes,
        ssd_bytes=plain.ssd_bytes,
        session_count=plain.session_count,
        placement_policy=plain.placement_policy,
    )


def read_recorded_streams(message: recording_pb2.RecordedStreams) -> types.RecordedStreams:
    return types.RecordedStreams(
        row_bytes=message.row_bytes,
        count=message.count,
    )


def write_recorded_streams(plain: types.RecordedStreams) -> recording_pb2.RecordedStreams:
    return recording_pb2.RecordedStreams(
        row_bytes=plain.row_bytes,
        count=plain.count,
    )


def read_recorded_layout(message: recording_pb2.RecordedLayout) -> types.RecordedLayout:
    return types.RecordedLayout(
        layout=message.layout,
        streams=tuple([read_recorded_streams(part) for part in message.streams]),
        token_bytes=message.token_bytes,
        segment_bytes=message.segment_bytes,
        segment_tokens=message.segment_tokens,
    )


def write_recorded_layout(plain: types.RecordedLayout) -> recording_pb2.RecordedLayout:
    return recording_pb2.RecordedLayout(
        layout=plain.layout,
        streams=[write_recorded_streams(part) for part in plain.streams],
        token_bytes=plain.token_bytes,
        segment_bytes=plain.segment_bytes,
        segment_tokens=plain.segment_tokens,
    )


def read_recorded_call(message: recording_pb2.RecordedCall) -> types.RecordedCall:
    return types.RecordedCall(
        at_ns=message.at_ns,
        kind=types.RecordedKind(message.kind),
        session=message.session,
        tenant=message.tenant,
        session_tokens=message.session_tokens,
        begin=message.begin,
        tokens=message.tokens,
        dram_tokens=message.dram_tokens,
        layout=message.layout if message.HasField("layout") else None,
        ttl_ms=message.ttl_ms,
        is_pinned=message.is_pinned,
        reason=message.reason,
        lease=message.lease,
        took_us=message.took_us,
        source=message.source,
        dropped=tuple(message.dropped),
        hint=message.hint,
        budget_bytes=message.budget_bytes if message.HasField("budget_bytes") else None,
        priority=message.priority,
        return_in_ms=message.return_in_ms if message.HasField("return_in_ms") else None,
        end=message.end if message.HasField("end") else None,
    )


def write_recorded_call(plain: types.RecordedCall) -> recording_pb2.RecordedCall:
    return recording_pb2.RecordedCall(
        at_ns=plain.at_ns,
        kind=recording_pb2.RecordedKind.ValueType(plain.kind),
        session=plain.session,
        tenant=plain.tenant,
        session_tokens=plain.session_tokens,
        begin=plain.begin,
        tokens=plain.tokens,
        dram_tokens=plain.dram_tokens,
        layout=plain.layout,
        ttl_ms=plain.ttl_ms,
        is_pinned=plain.is_pinned,
        reason=plain.reason,
        lease=plain.lease,
        took_us=plain.took_us,
        source=plain.source,
        dropped=plain.dropped,
        hint=plain.hint,
        budget_bytes=plain.budget_bytes,
        priority=plain.priority,
        return_in_ms=plain.return_in_ms,
        end=plain.end,
    )


def read_recording_part(message: recording_pb2.RecordResponse) -> types.RecordingPart:
    return types.RecordingPart(
        store=read_recorded_store(message.store) if message.HasField("store") else None,
        layouts=tuple([read_recorded_layout(part) for part in message.layouts]),
        calls=tuple([read_recorded_call(part) for part in message.calls]),
        lost_count=message.lost_count,
        elapsed_ns=nanoseconds(message.elapsed) if message.HasField("elapsed") else None,
    )


def write_recording_part(plain: types.RecordingPart) -> recording_pb2.RecordResponse:
    return recording_pb2.RecordResponse(
        store=None if plain.store is None else write_recorded_store(plain.store),
        layouts=[write_recorded_layout(part) for part in plain.layouts],
        calls=[write_recorded_call(part) for part in plain.calls],
        lost_count=plain.lost_count,
        elapsed=None if plain.elapsed_ns is None else span(plain.elapsed_ns),
    )


WRITERS: dict[type, Callable[[Any], Message]] = {
    StreamRange: write_stream_range,
    Content: write_content,
    ModelProbe: write_model_probe,
    types.BlockPart: write_block_part,
    types.BlockSpace: write_block_space,
    types.SessionInfo: write_session_info,
    types.LayerRange: write_layer_range,
    types.KindAvailability: write_kind_availability,
    types.LookupResult: write_lookup_result,
    types.SharedPrefix: write_shared_prefix,
    types.PrefixMatch: write_prefix_match,
    types.StoredStreams: write_stored_streams,
    types.ModelInfo: write_model_info,
    types.Forgotten: write_forgotten,
    types.HintResult: write_hint_result,
    types.LayerReadiness: write_layer_readiness,
    types.SessionReadiness: write_session_readiness,
    types.SessionEvent: write_session_event,
    types.TierStats: write_tier_stats,
    types.StoreStats: write_store_stats,
    types.TenantStats: write_tenant_stats,
    types.SessionHappening: write_session_happening,
    types.RequestMiss: write_request_miss,
    types.MissReport: write_miss_report,
    types.SettingValue: write_setting_value,
    types.SettingsReload: write_settings_reload,
    types.BadSegment: write_bad_segment,
    types.VerifyProgress: write_verify_progress,
    types.HeldLease: write_held_lease,
    types.DrainStatus: write_drain_status,
    types.EngineUse: write_engine_use,
    types.FleetNode: write_fleet_node,
    types.FleetView: write_fleet_view,
    types.CollectedFleet: write_collected_fleet,
    types.PublishedSessions: write_published_sessions,
    types.MethodActivity: write_method_activity,
    types.SessionActivity: write_session_activity,
    types.TenantActivity: write_tenant_activity,
    types.Activity: write_activity,
    types.BackupPart: write_backup_part,
    types.InjectedFault: write_injected_fault,
    types.RecordedStore: write_recorded_store,
    types.RecordedStreams: write_recorded_streams,
    types.RecordedLayout: write_recorded_layout,
    types.RecordedCall: write_recorded_call,
    types.RecordingPart: write_recording_part,
}
