//! Tables of which copy fetches, waits and downloads.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::{InferenceNodeSpec, InferenceNodeStatus, Model, ModelCopyStatus, ModelSpec};

use super::*;
use crate::model::copy_spec;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;
const REMOTE: &str = "hf://owner/m";

fn source(uri: &str) -> ModelSource {
    ModelSource { uri: uri.to_owned(), ..ModelSource::default() }
}

/// `a waits done=5 fails=DiskPressure`: a node, and its copy's supply and status.
fn copy(words: &str) -> Arc<ModelCopy> {
    let mut words = words.split(' ');
    let mut model = Model::new("m", ModelSpec { source: source(REMOTE), ..ModelSpec::default() });
    model.metadata.namespace = Some("ns".to_owned());
    let mut copy = copy_object(copy_spec(&model, words.next().unwrap(), CopyMode::Files));
    let mut status = ModelCopyStatus::default();
    for word in words {
        let (word, value) = word.split_once('=').unwrap_or((word, ""));
        let text = Some(value.to_owned());
        match word {
            "fetches" => {}
            "waits" => copy.spec.supply = Some(CopySource::default()),
            "receives" => {
                copy.spec.supply = Some(CopySource { content: Some(value.repeat(64)), from: Vec::new() });
            }
            "headers" => copy.spec.want = CopyMode::Headers,
            "leaves" => copy.metadata.deletion_timestamp = Some(Time(NOW)),
            "asked" => copy.spec.commit = text,
            "ready" => {
                let reason = Reason::Verified;
                conditions::set(&mut status.conditions, Type::Ready, true, reason, "", None, NOW);
                status.content = (!value.is_empty()).then(|| value.repeat(64));
            }
            "odd" => status.content = text,
            "fails" => {
                let reason = conditions::parse_reason(value).unwrap();
                conditions::set(&mut status.conditions, Type::Ready, false, reason, "", None, NOW);
            }
            "done" => status.bytes_done = value.parse().unwrap(),
            "read" => status.commit = text,
            other => panic!("{other}"),
        }
    }
    copy.status = Some(status);
    Arc::new(copy)
}

fn copies(lines: &[&str]) -> Vec<Arc<ModelCopy>> {
    lines.iter().map(|line| copy(line)).collect()
}

/// `a b- c? d6`: `-` is unreachable, `?` is an older release, `6` is IPv6.
fn world(words: &str) -> BTreeMap<String, PeerNode> {
    let node = |word: &str| {
        let (name, sort) = word.split_at(1);
        let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
        let mut status = InferenceNodeStatus::default();
        let address = if sort == "6" { "fd00::7" } else { "10.0.0.7" };
        status.addresses = vec!["no-address".to_owned(), address.to_owned(), "10.9.9.9".to_owned()];
        status.peer_port = (sort != "?").then_some(7946);
        let reason = Reason::LeaseRenewed;
        conditions::set(&mut status.conditions, Type::Reachable, sort != "-", reason, "", None, NOW);
        node.status = Some(status);
        Arc::new(node)
    };
    peer_nodes(&words.split(' ').map(node).collect::<Vec<_>>())
}

/// `a:source b:waits c:d<a,b`.
fn shown(decided: &BTreeMap<String, Option<CopySource>>) -> String {
    let word = |(copy, supply): (&String, &Option<CopySource>)| {
        let node = copy.rsplit('.').next().unwrap();
        match supply {
            None => format!("{node}:source"),
            Some(CopySource { content: None, from }) if from.is_empty() => format!("{node}:waits"),
            Some(CopySource { content, from }) => {
                let from: Vec<&str> = from.iter().map(|peer| peer.node_name.as_str()).collect();
                format!("{node}:{}<{}", &content.as_ref().unwrap()[..1], from.join(","))
            }
        }
    };
    decided.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// The copies after the decision was applied.
fn carried_out(
    copies: &[Arc<ModelCopy>],
    decided: &BTreeMap<String, Option<CopySource>>,
) -> Vec<Arc<ModelCopy>> {
    let apply_decision = |copy: &Arc<ModelCopy>| {
        let mut copy = copy.as_ref().clone();
        if let Some(supply) = decided.get(&copy.name_any()) {
            copy.spec.supply.clone_from(supply);
        }
        Arc::new(copy)
    };
    copies.iter().map(apply_decision).collect()
}

/// One table for all: the decision, and that it is stable.
fn check(cases: &[(&str, &str, &[&str], &str)]) {
    for (story, nodes, lines, expected) in cases {
        let (copies, nodes) = (copies(lines), world(nodes));
        let decided = decide(&source(REMOTE), &copies, &nodes);
        assert_eq!(shown(&decided), *expected, "{story}");
        let after = carried_out(&copies, &decided);
        assert_eq!(shown(&decide(&source(REMOTE), &after, &nodes)), *expected, "{story}: and stays");
        assert_eq!(changes(&source(REMOTE), &after, &nodes), [], "{story}: nothing is left to write");
    }
}

#[test]
fn one_copy_fetches_and_the_others_wait() {
    check(&[
        ("nobody", "a", &[], ""),
        ("one alone", "a", &["a waits"], "a:source"),
        ("one alone that nobody hears of", "a-", &["a waits"], "a:source"),
        ("one alone whose node is gone", "b", &["a waits"], "a:source"),
        ("all are new", "a b c", &["c waits", "b waits", "a waits"], "a:source b:waits c:waits"),
        ("one fetches already", "a b c", &["a waits", "b", "c waits"], "a:waits b:source c:waits"),
        ("it has fewer bytes", "a b", &["a waits done=9", "b done=1"], "a:waits b:source"),
        (
            "all did, before there was supply",
            "a b c",
            &["a done=1", "b done=3", "c done=2"],
            "a:waits b:source c:waits",
        ),
        ("some bytes are there", "a b", &["a waits", "b waits done=4"], "a:waits b:source"),
        ("headers are another matter", "a b", &["a headers", "b waits"], "b:source"),
        ("one is leaving", "a b", &["a leaves", "b waits"], "b:source"),
        ("an older agent gives nothing to others", "a? b", &["a waits", "b waits"], "a:waits b:source"),
        ("an older agent is all there is", "a? b-", &["a waits", "b waits"], "a:source b:waits"),
        (
            "one is verified and does not say what",
            "a b c",
            &["a ready", "b waits", "c waits"],
            "b:source c:waits",
        ),
    ]);
}

#[test]
fn failing_fetcher_is_replaced_and_keeps_retrying() {
    check(&[
        ("its node went away", "a- b c", &["a done=9", "b waits", "c waits"], "a:source b:source c:waits"),
        ("it never began", "a- b", &["a waits", "b waits"], "a:waits b:source"),
        ("back, with more bytes", "a b c", &["a done=9", "b done=2", "c waits"], "a:source b:waits c:waits"),
        ("no room", "a b", &["a fails=DiskPressure", "b waits"], "a:source b:source"),
        ("no credentials", "a b", &["a fails=SourceForbidden", "b waits"], "a:source b:source"),
        ("no way out", "a b", &["a done=9 fails=SourceUnreachable", "b waits"], "a:source b:source"),
        ("all alike", "a b", &["a fails=SourceNotFound", "b waits"], "a:source b:waits"),
        ("bad bytes for all", "a b", &["a fails=DigestMismatch", "b waits"], "a:source b:waits"),
        ("it tries again", "a b", &["a fails=Downloading", "b waits"], "a:source b:waits"),
        (
            "rather one that fails than one that is gone",
            "a- b",
            &["a waits", "b waits fails=DiskFull"],
            "a:waits b:source",
        ),
        (
            "two failed, the third is next",
            "a b c",
            &["a fails=SourceForbidden", "b fails=SourceUnreachable", "c waits"],
            "a:source b:source c:source",
        ),
        ("all fail", "a b", &["a fails=SourceUnreachable", "b fails=SourceUnreachable"], "a:source b:source"),
        (
            "who gets on sends nobody back who fails",
            "a b c",
            &["a fails=SourceUnreachable", "b fails=Downloading", "c fails=InProgress"],
            "a:source b:source c:waits",
        ),
    ]);
}

#[test]
fn missed_peers_are_not_treated_as_an_unreachable_source() {
    let copies = copies(&["a receives=d done=5 fails=SourceUnreachable", "b waits"]);
    assert_eq!(shown(&decide(&source(REMOTE), &copies, &world("a b"))), "a:source b:waits");
}

#[test]
fn copies_fetch_from_the_holder_and_from_each_other() {
    check(&[
        ("the first", "a b c", &["a ready=d", "b waits", "c done=5"], "b:d<a,c c:d<a,b"),
        ("all are there", "a b", &["a ready=d", "b ready=d"], ""),
        (
            "who lacks room waits for it on its own",
            "a b",
            &["a ready=d", "b waits fails=DiskPressure"],
            "b:d<a",
        ),
        (
            "who is gone gives nothing, and gets it when it is back",
            "a b- c",
            &["a ready=d", "b", "c"],
            "b:d<a,c c:d<a",
        ),
        ("who is older gives nothing", "a b? c", &["a ready=d", "b", "c"], "b:d<a,c c:d<a"),
        ("who is leaving gives nothing", "a b c", &["a ready=d", "b leaves", "c"], "c:d<a"),
        ("headers give nothing", "a b c", &["a ready=d", "b headers", "c"], "c:d<a"),
        (
            "the holder is gone",
            "a- b c",
            &["a ready=d", "b receives=d", "c receives=d done=3"],
            "b:waits c:source",
        ),
        ("the holder is leaving", "a b", &["a ready=d leaves", "b receives=d"], "b:source"),
        ("the holder is older", "a? b", &["a ready=d", "b waits"], "b:source"),
        ("most agree", "a b c d", &["a ready=d", "b ready=c", "c ready=c", "d"], "d:c<b,c"),
        ("as many agree", "a b c", &["a ready=f", "b ready=e", "c"], "c:e<b"),
        ("what the agent says is no digest", "a b", &["a ready odd=../etc", "b waits"], "b:source"),
        (
            "each its commit",
            "a b c d e",
            &["a ready=d read=1", "b ready=c read=2", "c asked=2", "d asked=3", "e asked=3 waits"],
            "c:c<b d:source e:waits",
        ),
        ("a commit nobody names", "a b c", &["a ready=d", "b asked=2", "c"], "b:d<a,c c:d<a,b"),
    ]);
}

#[test]
fn a_digest_is_64_hexadecimal_digits() {
    for (text, good) in [("0a".repeat(32), true), ("0A".repeat(32), false), ("0a".repeat(31), false)] {
        assert_eq!(is_digest(&text), good, "{text}");
    }
}

#[test]
fn copies_of_local_sources_have_no_supply() {
    let copies = copies(&["a ready=f", "b waits", "c"]);
    for uri in ["file:///models/m", "builtin://smoke"] {
        assert_eq!(shown(&decide(&source(uri), &copies, &world("a b c"))), "b:source c:source", "{uri}");
        let spec = ModelCopySpec { source: source(uri), want: CopyMode::Files, ..ModelCopySpec::default() };
        assert_eq!(initial_source(&spec, None), None, "{uri}");
    }
}

#[test]
fn an_address_is_written_as_sockets_are() {
    let copies = copies(&["a ready=f", "b ready=f", "c"]);
    let decided = decide(&source(REMOTE), &copies, &world("a b6 c"));
    let from = &decided["ns.m.c"].as_ref().unwrap().from;
    let addresses: Vec<&str> = from.iter().map(|peer| peer.address.as_str()).collect();
    assert_eq!(addresses, ["10.0.0.7:7946", "[fd00::7]:7946"]);
}

#[test]
fn supply_lists_holders_first_and_at_most_64_peers() {
    let name = |index: usize| format!("n{index:03}");
    let address = Some(SocketAddr::from(([10, 0, 0, 7], 7946)));
    let nodes = (0..100).map(|index| (name(index), PeerNode { reachable: true, address })).collect();
    // The last ten hold the files.
    let line = |index: usize| format!("{}{}", name(index), if index < 90 { " waits" } else { " ready=f" });
    let copies: Vec<Arc<ModelCopy>> = (0..100).map(|index| copy(&line(index))).collect();
    let decided = decide(&source(REMOTE), &copies, &nodes);
    assert_eq!(decided.len(), 90);
    for index in 0..90 {
        let from = &decided[&format!("ns.m.{}", name(index))].as_ref().unwrap().from;
        let names: Vec<&str> = from.iter().map(|peer| peer.node_name.as_str()).collect();
        assert_eq!(names.len(), 64);
        assert!(names.is_sorted() && !names.contains(&name(index).as_str()), "{index}: {names:?}");
        assert_eq!(names[54..], (90..100).map(name).collect::<Vec<_>>(), "{index}");
    }
}

#[test]
fn new_copy_waits_first_and_existing_copy_continues() {
    let spec = copy("a").spec.agent_work();
    for (story, known, expected) in [
        ("new", None, Some(CopySource::default())),
        ("only its headers were wanted", Some(copy("a headers")), Some(CopySource::default())),
        ("it fetches", Some(copy("a")), None),
        ("it receives", Some(copy("a receives=f")), None),
    ] {
        assert_eq!(initial_source(&spec, known.as_deref()), expected, "{story}");
    }
}

#[test]
fn interrupted_copy_creation_is_completed_first() {
    let mut half = copy("a waits").as_ref().clone();
    half.metadata.labels = None;
    let changes = changes(&source(REMOTE), &[Arc::new(half)], &world("a"));
    let [SourceChange { copy: name, supply: None, unfinished: Some(object) }] = changes.as_slice() else {
        panic!("{changes:?}")
    };
    assert_eq!(name, "ns.m.a");
    assert_eq!(object, &copy_object(copy("a").spec.clone()));
}
