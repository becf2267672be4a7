//! Peers of another release: unknown enum numbers and fields become a defined value, never a decoding error.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

use prost::Message as _;
use russet_rpc::engine as pb;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};

/// A number that no release uses.
const UNKNOWN: i32 = 4_711;

/// The bytes of a message with fields that only a newer peer has: a number, a text and a message.
fn with_unknown_field(message: &impl prost::Message) -> Vec<u8> {
    let mut bytes = message.encode_to_vec();
    prost::encoding::uint64::encode(900, &7, &mut bytes);
    prost::encoding::string::encode(901, &"new".to_owned(), &mut bytes);
    let step =
        pb::Step { slot: 1, offset: 2, tokens: vec![3], draft_tokens: 0, adapter: 0, scored_tokens: 0 };
    prost::encoding::message::encode(902, &step, &mut bytes);
    bytes
}

fn event(event: pb::generate_event::Event) -> GenerationEvent {
    let bytes = with_unknown_field(&pb::GenerateEvent { event: Some(event), ..Default::default() });
    pb::GenerateEvent::decode(bytes.as_slice()).unwrap().into()
}

#[test]
fn an_unknown_reason_still_finishes_with_its_usage() {
    let finished = pb::Finished {
        reason: UNKNOWN,
        prompt_tokens: 3,
        completion_tokens: 5,
        cached_tokens: 0,
        stop_string: None,
    };
    let GenerationEvent::Finished { reason, usage } = event(pb::generate_event::Event::Finished(finished))
    else {
        panic!("a finished response has another event")
    };
    assert_eq!((reason, usage.prompt_tokens, usage.completion_tokens), (FinishReason::Stop, 3, 5));
}

#[test]
fn unknown_failure_maps_to_internal_and_keeps_its_message() {
    let failed = pb::Failed { kind: UNKNOWN, message: "the moon is full".into(), reason: UNKNOWN };
    assert_eq!(
        event(pb::generate_event::Event::Failed(failed)),
        GenerationEvent::Failed(GenerationFailure {
            kind: FailureKind::Internal,
            message: "the moon is full".into()
        })
    );
}

#[test]
fn unknown_event_becomes_a_failure_with_a_remedy() {
    let mut bytes = Vec::new();
    prost::encoding::message::encode(77, &pb::Started::default(), &mut bytes);
    let GenerationEvent::Failed(failure) = pb::GenerateEvent::decode(bytes.as_slice()).unwrap().into() else {
        panic!("an unknown event was taken for another")
    };
    assert_eq!(failure.kind, FailureKind::Internal);
    assert!(failure.message.contains("upgrade the older of the two"), "{}", failure.message);
}

#[test]
fn unknown_phase_is_unspecified_and_other_fields_are_read() {
    let state = pb::EngineState { phase: UNKNOWN, epoch: 4, message: "m".into(), ..Default::default() };
    let state = pb::EngineState::decode(with_unknown_field(&state).as_slice()).unwrap();
    assert_eq!((state.phase(), state.epoch, state.message.as_str()), (pb::Phase::Unspecified, 4, "m"));
}

#[test]
fn messages_decode_past_fields_of_a_newer_peer() {
    fn check<M: prost::Message + Default + PartialEq + std::fmt::Debug>(message: M) {
        assert_eq!(M::decode(with_unknown_field(&message).as_slice()).unwrap(), message);
        // An older peer that leaves everything out can be decoded too.
        assert_eq!(M::decode([].as_slice()).unwrap(), M::default());
    }
    let words = || "words".to_owned();
    check(pb::GenerateRequest { id: words(), max_tokens: Some(3), ..Default::default() });
    check(pb::EngineDescription { build: words(), rank: 2, ..Default::default() });
    check(pb::Hello { build: words(), epoch: 3, ..Default::default() });
    check(pb::FollowCommand { command: Some(pb::follow_command::Command::Join(pb::Join {})) });
    check(pb::FollowReply {
        reply: Some(pb::follow_reply::Reply::Joined(pb::Joined { rank: 1, ..Default::default() })),
    });
    check(pb::WatchRequest::default());
    check(pb::StopRequest::default());
}
