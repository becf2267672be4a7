//! Runs of requests without a cluster: their names and terms, and whom they answer.

use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::conditions::Reason;
use russet_crds::{Pipeline, PipelineParameter, PipelineRunStatus};

use super::super::record::{ArtifactRef, StepRecord};
use super::super::status::{self, RunCondition};
use super::expected::LOOK_INTERVAL;
use super::*;
use crate::request_id::RequestId;
use crate::response_store::{InboxRow, ResponseStoreConfig, RunRow};

type Answer = oneshot::Receiver<Result<RunAnswer, String>>;

/// The runs of a gateway `g` with a store, and no API server.
struct RunsLab {
    runs: RequestedRuns,
    folder: tempfile::TempDir,
}

impl RunsLab {
    fn new() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let store =
            ResponseStore::open(&ResponseStoreConfig::new(folder.path().join("responses.db"))).unwrap();
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let runs = RequestedRuns::new(client, Arc::new(store));
        runs.gateway.set("g".to_owned()).unwrap();
        Self { runs, folder }
    }

    /// A request waits for this run, which is there.
    fn wait(&self, run: &PipelineRun) -> Answer {
        let (done, answer) = oneshot::channel();
        let waiting = WaitingRequest { wanted: run.clone(), text: "tea".to_owned(), uid: None, done };
        self.runs.waiting.lock().insert(full_name(run), waiting);
        self.runs.observe([run].into_iter(), |_| false);
        answer
    }

    fn database(&self, statement: &str) {
        let database = rusqlite::Connection::open(self.folder.path().join("responses.db")).unwrap();
        database.execute_batch(statement).unwrap();
    }
}

/// A run of `brief` that a request of the gateway `g` made.
fn requested_run(name: &str) -> PipelineRun {
    let parameter =
        ParameterValue { name: "prompt".into(), value: String::new(), sha256: Some(digest("tea")) };
    let spec = PipelineRunSpec {
        pipeline_ref: LocalReference::new("brief"),
        parameters: vec![parameter],
        zone: Some(Zone::Lan),
        attempt: 1,
        ..PipelineRunSpec::default()
    };
    let mut run = PipelineRun::new(name, spec);
    run.metadata.namespace = Some("n".to_owned());
    run.metadata.uid = Some(format!("uid-of-{name}"));
    run.metadata.labels = Some(BTreeMap::from([
        (names::LABEL_MANAGED_BY.to_owned(), names::MANAGED_BY_GATEWAY.to_owned()),
        (names::LABEL_GATEWAY.to_owned(), "g".to_owned()),
    ]));
    run
}

/// A run that ended with this output.
fn finished_record(run: &PipelineRun, output: &ArtifactRef) -> RunRecord {
    RunRecord {
        namespace: "n".to_owned(),
        name: run.name_any(),
        uid: run.uid().unwrap(),
        owner: "o".to_owned(),
        pipeline_name: "brief".to_owned(),
        pipeline: PipelineSpec::default(),
        parameters: BTreeMap::new(),
        attempt: 1,
        started: Timestamp::UNIX_EPOCH,
        finished: Some(Timestamp::UNIX_EPOCH),
        failure: None,
        steps: vec![StepRecord { output: Some(output.clone()), ..StepRecord::default() }],
        bytes: output.bytes,
    }
}

#[tokio::test]
async fn a_run_of_other_terms_gets_and_tells_nothing() {
    let lab = RunsLab::new();
    let run = requested_run("brief-1");
    let mut answer = lab.wait(&run);
    let sha256 = digest("tea");
    assert_eq!(lab.runs.text(&run, &sha256).as_deref(), Some("tea"));
    let other = PipelineRun {
        spec: PipelineRunSpec { zone: Some(Zone::Cloud), ..run.spec.clone() },
        metadata: kube::core::ObjectMeta { uid: Some("uid of another".to_owned()), ..run.metadata.clone() },
        status: None,
    };
    assert_eq!(lab.runs.text(&other, &sha256), None);
    assert!(lab.runs.is_awaited(&run) && !lab.runs.is_awaited(&other));
    assert!(!lab.runs.is_abandoned(&run) && lab.runs.is_abandoned(&other));
    lab.runs.refused(&other, "it is another one");
    lab.runs
        .ended(&RunRecord {
            failure: Some("bad".into()),
            ..finished_record(&other, &ArtifactRef::of(Vec::new(), false).0)
        })
        .await;
    assert!(answer.try_recv().is_err() && lab.runs.is_awaited(&run), "nothing is told");
    // It is in the place of the run that was there.
    lab.runs.observe([&other].into_iter(), |_| false);
    assert_eq!(answer.try_recv().unwrap().unwrap_err(), "it was deleted");
}

#[tokio::test]
async fn the_answer_of_a_run_waits_for_the_store() {
    let lab = RunsLab::new();
    let run = requested_run("brief-1");
    let (output, artifact) = ArtifactRef::of(b"warm".to_vec(), false);
    let record = finished_record(&run, &output);
    lab.runs.store.insert_run(record.to_row(), vec![artifact]).await.unwrap();
    let mut answer = lab.wait(&run);
    for table in ["run", "artifact"] {
        lab.database(&format!("PRAGMA legacy_alter_table = ON; ALTER TABLE {table} RENAME TO hidden"));
        lab.runs.ended_before(&run).await;
        assert!(answer.try_recv().is_err() && lab.runs.is_awaited(&run), "{table}");
        lab.database(&format!("PRAGMA legacy_alter_table = ON; ALTER TABLE hidden RENAME TO {table}"));
    }
    lab.runs.ended_before(&run).await;
    assert_eq!(answer.try_recv().unwrap().unwrap().text, "warm");
}

#[tokio::test]
async fn a_run_of_which_nothing_is_kept_says_its_status() {
    let lab = RunsLab::new();
    let run = requested_run("brief-1");
    let now = Timestamp::UNIX_EPOCH;
    let with = |status| PipelineRun { status: Some(status), ..run.clone() };
    let never = status::waiting(&run, RunCondition::Stalled, Reason::Failed, "parameter x is not given", now);
    let (output, _) = ArtifactRef::of(b"warm".to_vec(), false);
    let finished = status::of_record(&run, &finished_record(&run, &output), "g", now);
    let silent = PipelineRunStatus { finished_at: Some(Time(now)), ..PipelineRunStatus::default() };
    for (run, why) in
        [(with(never), "parameter x is not given"), (with(finished), NOT_KEPT), (with(silent), NOT_KEPT)]
    {
        let mut answer = lab.wait(&run);
        lab.runs.ended_before(&run).await;
        assert_eq!(answer.try_recv().unwrap().unwrap_err(), why);
    }
    // What another release kept may be there, and mean nothing to this one.
    let row = RunRow { record: Bytes::from_static(b"{}"), ..finished_record(&run, &output).to_row() };
    lab.runs.store.insert_run(row, Vec::new()).await.unwrap();
    let mut answer = lab.wait(&run);
    lab.runs.ended_before(&run).await;
    let why = answer.try_recv().unwrap().unwrap_err();
    assert!(why.starts_with("what is kept of it cannot be read: "), "{why}");
}

#[tokio::test]
async fn a_request_that_has_its_run_makes_no_more_of_them() {
    let lab = RunsLab::new();
    let target = PipelineTarget { namespace: "n", name: "brief", parameter: "prompt" };
    assert_eq!(lab.runs.not_yet(), Some("the gateway has not listed the Pipelines yet"));
    let parameter = PipelineParameter { name: "prompt".into(), kind: ParameterType::Text, default: None };
    let spec = PipelineSpec { parameters: vec![parameter], ..PipelineSpec::default() };
    let pipelines = BTreeMap::from([(("n".into(), "brief".into()), Pipeline::new("brief", spec))]);
    let objects =
        PipelineObjects { listed: true, pipelines: Arc::new(pipelines), ..PipelineObjects::default() };
    lab.runs.objects.send_replace(Arc::new(objects));
    assert_eq!(lab.runs.not_yet(), None);
    let repeat = "inbox_7/100";
    let names = (1..MAX_RUNS).map(|number| format!("brief-{number}"));
    let runs: Vec<_> =
        names.chain([repeated_name("brief", repeat)]).map(|name| requested_run(&name)).collect();
    let refused = |repeat| lab.runs.refusal(target, repeat).map(|closed| closed.why);
    lab.runs.observe(runs.iter().skip(1), |_| false);
    assert_eq!(refused(None), None);
    lab.runs.observe(runs.iter(), |_| false);
    let full = Some("the gateway has 1000 runs of requests, 1000 at most".to_owned());
    assert_eq!((refused(None), refused(Some("inbox_8/100"))), (full.clone(), full));
    assert_eq!(refused(Some(repeat)), None);
}

#[tokio::test]
async fn the_inbox_is_read_once_a_second_at_most() {
    let row = |unique: &str| {
        let id = RequestId { unique: unique.into(), shown: unique.into() };
        InboxRow::new("o", &id, "/v1/chat/completions", 100)
    };
    let [kept, gone] = ["7", "8"].map(|unique| requested_run(&repeated_name("brief", &row(unique).repeat())));
    let new = requested_run("brief-new");
    let (expected, looks, start) = (ExpectedRuns::default(), AtomicUsize::new(0), Instant::now());
    let among =
        async |halves: u32, runs: &[&PipelineRun], rows: Result<Vec<InboxRow>, ResponseStoreError>| {
            let look = || {
                looks.fetch_add(1, Ordering::Relaxed);
                std::future::ready(rows)
            };
            let found = expected.among(start + halves * LOOK_INTERVAL / 2, runs.iter().copied(), look).await;
            let name = |run: &&PipelineRun| found.contains(&full_name(run));
            (runs.iter().map(name).collect::<Vec<_>>(), looks.load(Ordering::Relaxed))
        };
    assert_eq!(among(0, &[], Ok(Vec::new())).await, (vec![], 0));
    assert_eq!(among(0, &[&kept, &gone], Ok(vec![row("7")])).await, (vec![true, false], 1));
    // One that comes to be of nobody meanwhile stays until the next look.
    let all = [&kept, &gone, &new];
    assert_eq!(among(1, &all, Ok(Vec::new())).await, (vec![true, false, true], 1));
    assert_eq!(among(2, &all, Ok(vec![row("7")])).await, (vec![true, false, false], 2));
    let failed = ResponseStoreError::Failed("the disk is gone".to_owned());
    assert_eq!(among(4, &all, Err(failed)).await, (vec![true; 3], 3));
}

#[test]
fn the_run_of_a_request_has_one_name() {
    let name = |pipeline: &str, repeat: &str| repeated_name(pipeline, repeat);
    let begun = name("brief", "inbox_7/100");
    assert_eq!(name("brief", "inbox_7/100"), begun);
    // Another request, the same one reopened, and another Pipeline.
    for other in [name("brief", "inbox_8/100"), name("brief", "inbox_7/101"), name("other", "inbox_7/100")] {
        assert_ne!(other, begun);
    }
    assert!(begun.starts_with("brief-") && !begun.contains("inbox"), "{begun}");
    assert_eq!(name(&"p".repeat(253), "inbox_7/100").len(), 63, "a label may have it");
}

#[test]
fn a_run_that_is_there_is_taken_for_the_same_terms_alone() {
    let run = |change: &dyn Fn(&mut PipelineRun)| {
        let mut run = requested_run("brief-1");
        change(&mut run);
        run
    };
    let wanted = run(&|_| {});
    assert!(is_same(&run(&|_| {}), &wanted));
    assert!(is_same(&run(&|run| run.spec.attempt = 2), &wanted), "somebody resumed it");
    let changes: [&dyn Fn(&mut PipelineRun); 5] = [
        &|run| run.spec.zone = Some(Zone::Cloud),
        &|run| run.spec.key_ref = Some(LocalReference::new("eve")),
        &|run| run.spec.parameters[0].sha256 = Some(digest("coffee")),
        &|run| run.spec.pipeline_ref = LocalReference::new("other"),
        &|run| run.metadata.labels = None,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        assert!(!is_same(&run(change), &wanted), "{number}");
    }
}

#[test]
fn a_pipeline_takes_one_text_and_defaults() {
    let parameter = |name: &str, kind, default: Option<&str>| PipelineParameter {
        name: name.to_owned(),
        kind,
        default: default.map(str::to_owned),
    };
    let spec = |parameters| PipelineSpec { parameters, ..PipelineSpec::default() };
    let text = || parameter("prompt", ParameterType::Text, None);
    for (pipeline, why) in [
        (spec(vec![text()]), None),
        (spec(vec![text(), parameter("tone", ParameterType::Text, Some("dry"))]), None),
        (spec(vec![]), Some("it has no parameter prompt")),
        (spec(vec![parameter("prompt", ParameterType::File, None)]), Some("is no text")),
        (spec(vec![text(), parameter("tone", ParameterType::Text, None)]), Some("tone has no default")),
    ] {
        let found = unfit(&pipeline, "prompt");
        assert_eq!(found.is_some(), why.is_some(), "{found:?}");
        assert!(found.unwrap_or_default().contains(why.unwrap_or_default()), "{why:?}");
    }
    assert_eq!(unfit_text(&"é".repeat(MAX_TEXT_CHARS)), None);
    assert!(unfit_text(&"é".repeat(MAX_TEXT_CHARS + 1)).is_some());
}
