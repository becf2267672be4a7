//! The store over real files: what is durable, whose it is, and what becomes of files that are full, old or torn.

use std::path::Path;

use axum::http::HeaderMap;
use futures::future::join_all;

use super::*;
use crate::request_id::RequestId;

/// 2033; rows of it are not too old.
const CREATED: u64 = 2_000_000_000;

fn row(id: &str, owner: &str, parent: Option<&str>, bytes: usize) -> NewRow {
    NewRow {
        id: id.into(),
        owner: owner.into(),
        created: CREATED,
        parent: parent.map(str::to_owned),
        finished: true,
        body: vec![b'b'; bytes].into(),
        input: format!("input of {id}").into(),
        replay: None,
    }
}

fn open(path: &Path) -> ResponseStore {
    ResponseStore::open(&ResponseStoreConfig::new(path)).unwrap()
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("responses.db");
    (folder, path)
}

const LIMITS: ConversationLimits = ConversationLimits { turns: 10, bytes: 1 << 20 };

#[tokio::test]
async fn a_response_is_there_for_its_owner_alone() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.insert(row("1", "a/k", None, 5)).await.unwrap();
    assert_eq!(store.body("a/k", "1").unwrap(), Some(StoredBody { finished: true, body: b"bbbbb".to_vec() }));
    assert_eq!(store.input("a/k", "1").unwrap().unwrap(), b"input of 1");
    for (owner, id) in [("a/other", "1"), ("loopback", "1"), ("a/k", "2"), ("a/k", "")] {
        assert_eq!(store.body(owner, id).unwrap(), None, "{owner} {id}");
        assert_eq!(store.input(owner, id).unwrap(), None);
        assert_eq!(store.events(owner, id, 0).unwrap(), None);
        let missing = ConversationError::Missing(id.into());
        assert_eq!(store.conversation(owner, id, LIMITS, |_| true), Err(missing));
        assert!(!store.delete(owner, id).await.unwrap());
    }
    assert!(store.delete("a/k", "1").await.unwrap());
    assert_eq!(store.body("a/k", "1").unwrap(), None);
}

#[tokio::test]
async fn a_conversation_is_bounded_and_ends_at_a_gap() {
    let (_folder, path) = folder();
    let store = open(&path);
    for (id, parent) in [("1", None), ("2", Some("1")), ("3", Some("2")), ("x", Some("2"))] {
        store.insert(row(id, "o", parent, 100)).await.unwrap();
    }
    let ids = |limits| {
        let turns = store.conversation("o", "3", limits, |_| true)?;
        Ok(turns.into_iter().map(|turn| turn.id).collect::<Vec<_>>())
    };
    assert_eq!(ids(LIMITS), Ok(["1", "2", "3"].map(str::to_owned).to_vec()));
    let turns = ConversationLimits { turns: 2, ..LIMITS };
    assert_eq!(ids(turns), Err(ConversationError::TooManyTurns(2)));
    let bytes = ConversationLimits { bytes: 329, ..LIMITS };
    assert_eq!(ids(bytes), Err(ConversationError::TooManyBytes(329)));
    assert_eq!(ids(ConversationLimits { bytes: 330, turns: 3 }).unwrap().len(), 3);
    let mut admitted = Vec::new();
    let refused = store.conversation("o", "3", LIMITS, |bytes| {
        admitted.push(bytes);
        admitted.len() < 2
    });
    assert_eq!((refused, admitted), (Err(ConversationError::NotAdmitted), vec![110, 110]));
    store.delete("o", "1").await.unwrap();
    assert_eq!(ids(LIMITS), Err(ConversationError::Missing("1".into())));
}

#[tokio::test]
async fn events_are_found_by_number_and_go_with_the_response() {
    let (_folder, path) = folder();
    let store = open(&path);
    let unfinished = NewRow { finished: false, ..row("1", "o", None, 1) };
    store.insert(unfinished).await.unwrap();
    let chunk = |first, next| EventChunk { first, next, text: format!("{first}..{next}").into() };
    for (first, next) in [(0, 3), (3, 4), (4, 9)] {
        store.append_events("1", chunk(first, next)).await.unwrap();
    }
    for (from, expected) in [
        (0, Some(chunk(0, 3))),
        (2, Some(chunk(0, 3))),
        (3, Some(chunk(3, 4))),
        (8, Some(chunk(4, 9))),
        (9, None),
    ] {
        assert_eq!(store.events("o", "1", from).unwrap(), expected, "{from}");
    }
    assert!(!store.body("o", "1").unwrap().unwrap().finished);
    store.finish("1", Bytes::from_static(b"end")).await.unwrap();
    assert_eq!(store.body("o", "1").unwrap(), Some(StoredBody { finished: true, body: b"end".to_vec() }));
    assert!(store.delete("o", "1").await.unwrap());
    assert_eq!(store.events("o", "1", 0).unwrap(), None);
    assert_eq!(store.finish("1", Bytes::new()).await, Err(ResponseStoreError::Deleted));
    assert_eq!(store.append_events("1", chunk(9, 10)).await, Err(ResponseStoreError::Deleted));
}

#[tokio::test]
async fn acknowledged_responses_survive_a_kill() {
    let (folder, path) = folder();
    let store = open(&path);
    let rows = (0..200).map(|number| store.insert(row(&number.to_string(), "o", None, 2000)));
    let results = join_all(rows).await;
    assert_eq!(results, vec![Ok(()); 200]);
    // The files as a killed process leaves them: the log is not merged.
    let killed = folder.path().join("killed.db");
    for suffix in ["", "-wal"] {
        let with = |path: &Path| format!("{}{suffix}", path.display());
        std::fs::copy(with(&path), with(&killed)).unwrap();
    }
    let reopened = open(&killed);
    for number in 0..200 {
        assert_eq!(reopened.body("o", &number.to_string()).unwrap().unwrap().body.len(), 2000, "{number}");
    }
}

#[tokio::test]
async fn a_write_that_fails_fails_no_other_of_its_group() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.insert(row("twice", "o", None, 1)).await.unwrap();
    let rows = (0..100).map(|number| match number {
        50 => store.insert(row("twice", "o", None, 1)),
        number => store.insert(row(&number.to_string(), "o", None, 1)),
    });
    let results = join_all(rows).await;
    for (number, result) in results.iter().enumerate() {
        assert_eq!(result.is_ok(), number != 50, "{number}: {result:?}");
        assert_eq!(store.body("o", &number.to_string()).unwrap().is_some(), number != 50);
    }
    assert!(
        matches!(&results[50], Err(ResponseStoreError::Failed(cause)) if cause.contains("UNIQUE")),
        "{results:?}"
    );
}

#[test]
fn the_oldest_responses_make_room() {
    let (_folder, path) = folder();
    let max = 400 << 10;
    let mut database = Database::open(&path, max).unwrap();
    let mut insert = |id: usize, bytes| {
        database.commit(&[&Change::Insert(row(&id.to_string(), "o", None, bytes))])?;
        assert!(database.used_bytes() <= max + (16 << 10), "{}", database.used_bytes());
        Ok(())
    };
    for id in 0..100 {
        insert(id, 20 << 10).unwrap();
    }
    // One that has no room at all deletes nothing.
    assert_eq!(insert(100, 500 << 10), Err(ResponseStoreError::TooLarge { bytes: (500 << 10) + 12, max }));
    let reader = database::open_reader(&path).unwrap();
    let is_there = |id: usize| database::body(&reader, "o", &id.to_string()).unwrap().is_some();
    let kept: Vec<usize> = (0..101).filter(|id| is_there(*id)).collect();
    assert!((12..=20).contains(&kept.len()), "{kept:?}");
    assert_eq!(kept, (100 - kept.len()..100).collect::<Vec<_>>());
    assert!(std::fs::metadata(&path).unwrap().len() < 2 * max, "what was deleted is used again");
}

#[test]
fn responses_that_are_too_old_are_deleted() {
    let (_folder, path) = folder();
    let mut database = Database::open(&path, 1 << 30).unwrap();
    for created in 0..10 {
        let row = NewRow { created, ..row(&created.to_string(), "o", None, 1) };
        database.commit(&[&Change::Insert(row)]).unwrap();
    }
    let mut expire = || database.expire(1007, Duration::from_secs(1000), 5).unwrap();
    assert_eq!([expire(), expire(), expire()], [5, 2, 0]);
    let reader = database::open_reader(&path).unwrap();
    let is_there = |id: &usize| database::body(&reader, "o", &id.to_string()).unwrap().is_some();
    assert_eq!((0..10).filter(is_there).collect::<Vec<_>>(), [7, 8, 9]);
}

#[test]
fn a_full_disk_refuses_and_loses_nothing() {
    let (_folder, path) = folder();
    let mut database = Database::open(&path, 1 << 30).unwrap();
    database.commit(&[&Change::Insert(row("kept", "o", None, 10_000))]).unwrap();
    database.limit_pages(16);
    let large = Change::Insert(row("large", "o", None, 100_000));
    let finish = Change::Finish { id: "kept".into(), body: vec![b'x'; 100_000].into() };
    for change in [&large, &finish] {
        assert_eq!(database.commit(&[change]), Err(ResponseStoreError::DiskFull));
    }
    // What has room is kept, and what was kept is there.
    database.commit(&[&Change::Insert(row("small", "o", None, 10))]).unwrap();
    let reader = database::open_reader(&path).unwrap();
    for (id, bytes) in [("kept", Some(10_000)), ("small", Some(10)), ("large", None)] {
        let found = database::body(&reader, "o", id).unwrap().map(|found| found.body.len());
        assert_eq!(found, bytes, "{id}");
    }
}

#[tokio::test]
async fn a_damaged_file_is_put_aside_and_begun_anew() {
    let torn = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
    let noise = |bytes: &mut Vec<u8>| bytes[..4096].fill(0xa5);
    let middle = |bytes: &mut Vec<u8>| {
        let half = bytes.len() / 2;
        bytes[half..half + 8192].fill(0xff);
    };
    for damage in [torn, noise, middle] as [fn(&mut Vec<u8>); 3] {
        let (folder, path) = folder();
        let mut database = Database::open(&path, 1 << 30).unwrap();
        for id in 0..50 {
            database.commit(&[&Change::Insert(row(&id.to_string(), "o", None, 3000))]).unwrap();
        }
        drop(database);
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, &bytes).unwrap();

        let store = open(&path);
        assert_eq!(store.body("o", "1").unwrap(), None);
        store.insert(row("1", "o", None, 5)).await.unwrap();
        assert!(store.body("o", "1").unwrap().is_some());
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        let aside = names.iter().find(|name| name.starts_with("responses.db.damaged-")).unwrap();
        assert_eq!(std::fs::read(folder.path().join(aside)).unwrap(), bytes, "{names:?}");
    }
}

#[test]
fn files_of_others_and_of_later_releases_are_left_alone() {
    let (_folder, path) = folder();
    let foreign = Connection::open(&path).unwrap();
    foreign.execute_batch("CREATE TABLE theirs (a)").unwrap();
    drop(foreign);
    assert_eq!(Database::open(&path, 1).err(), Some(ResponseStoreError::Foreign { path: path.clone() }));

    let (_folder, path) = self::folder();
    drop(Database::open(&path, 1 << 30).unwrap());
    Connection::open(&path).unwrap().execute_batch("PRAGMA user_version = 9").unwrap();
    let newer = ResponseStoreError::Newer { path: path.clone(), found: 9, known: 4 };
    assert_eq!(Database::open(&path, 1).err(), Some(newer));

    let nowhere = Path::new("/nonexistent/responses.db");
    assert!(matches!(Database::open(nowhere, 1).err(), Some(ResponseStoreError::Open { .. })));
}

#[test]
fn the_file_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let (folder, path) = folder();
    let _store = open(&path);
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", entry.file_name());
    }
}

fn file(id: &str, created: u64) -> FileHead {
    FileHead {
        id: id.into(),
        owner: "o".into(),
        name: "f".into(),
        purpose: FilePurpose::Batch,
        created,
        expires: 0,
        bytes: 0,
    }
}

/// A complete file with one part, which expires then.
fn keep_file(
    database: &mut Database,
    id: &str,
    created: u64,
    expires: u64,
    bytes: usize,
) -> Result<(), ResponseStoreError> {
    let part = FilePart { first: 0, text: vec![b'x'; bytes].into() };
    for change in [
        FileChange::Insert(file(id, created)),
        FileChange::Append { id: id.into(), part },
        FileChange::Complete { id: id.into(), created, expires },
    ] {
        database.commit(&[&Change::File(change)])?;
    }
    Ok(())
}

fn batch(id: &str, input: &str, ended: bool) -> Change {
    Change::Batch(BatchChange::Insert(BatchRow {
        id: id.into(),
        owner: "o".into(),
        dialect: "openai".into(),
        created: 1,
        ended,
        input: input.into(),
        output: format!("{id}-out"),
        errors: format!("{id}-err"),
        record: vec![],
    }))
}

#[test]
fn a_batch_that_has_not_ended_keeps_its_files() {
    const FAR: u64 = 4_000_000_000;
    let (_folder, path) = folder();
    let max = 1 << 20;
    let mut database = Database::open(&path, max).unwrap();
    keep_file(&mut database, "needed", 1, FAR, 300_000).unwrap();
    database.commit(&[&batch("b", "needed", false)]).unwrap();
    assert_eq!(database.commit(&[&batch("lost", "nix", false)]), Err(ResponseStoreError::Deleted));
    let refused = FileChange::Delete { owner: "o".into(), id: "needed".into() };
    let in_use = ResponseStoreError::InUse { batch: "b".into() };
    assert_eq!(database.commit(&[&Change::File(refused.clone())]), Err(in_use));
    // Others make room for others, the oldest first, and not the one that is needed.
    for id in 2..12 {
        keep_file(&mut database, &id.to_string(), id, FAR, 300_000).unwrap();
    }
    let reader = database::open_reader(&path).unwrap();
    let is_there = |id: &str| files::file(&reader, "o", id, 0).unwrap().is_some();
    assert!(is_there("needed") && is_there("11") && !is_there("2"));
    assert_eq!(database.expire(FAR, Duration::from_secs(FAR), 64).unwrap(), 2);
    assert!(is_there("needed") && !is_there("11"));
    let end = BatchChange::Update { id: "b".into(), ended: true, record: vec![] };
    database.commit(&[&Change::Batch(end)]).unwrap();
    assert_eq!(database.commit(&[&Change::File(refused)]), Ok(vec![1]));
    assert!(!is_there("needed"));
}

#[test]
fn what_an_upload_left_unfinished_is_gone_at_the_next_start() {
    let (_folder, path) = folder();
    let mut database = Database::open(&path, 1 << 30).unwrap();
    for id in ["left", "input"] {
        database.commit(&[&Change::File(FileChange::Insert(file(id, 1)))]).unwrap();
    }
    database.commit(&[&batch("b", "input", false)]).unwrap();
    drop(database);
    drop(Database::open(&path, 1 << 30).unwrap());
    let names =
        Connection::open(&path).unwrap().query_row("SELECT group_concat(id) FROM file", [], |row| row.get(0));
    assert_eq!(names, Ok("input".to_owned()));
}

fn request(number: usize, bytes: usize) -> (InboxRow, InboxBody) {
    let id = RequestId { unique: format!("{number:024x}").into(), shown: "r".into() };
    let row = InboxRow { key: Some(format!("k{number}")), ..InboxRow::new("o", &id, "/v1/x", CREATED) };
    (row, InboxBody::new(&HeaderMap::new(), vec![b'x'; bytes].into()))
}

fn insert_request(number: usize, bytes: usize) -> Change {
    let (row, body) = request(number, bytes);
    Change::Inbox(InboxChange::Insert(row.into(), body))
}

#[test]
fn a_full_disk_refuses_requests_and_loses_none() {
    let (_folder, path) = folder();
    let mut database = Database::open(&path, 1 << 30).unwrap();
    database.commit(&[&insert_request(1, 1000)]).unwrap();
    database.limit_pages(40);
    let id = request(1, 0).0.id;
    let end = |bytes| {
        let part = AnswerPart { start: 0, bytes: vec![b'a'; bytes] };
        Change::Inbox(InboxChange::End {
            id: id.clone(),
            state: InboxState::Done,
            now: 1,
            head: "{}".into(),
            part,
        })
    };
    for change in [insert_request(2, 500_000), end(500_000)] {
        assert_eq!(database.commit(&[&change]), Err(ResponseStoreError::DiskFull));
    }
    let reader = database::open_reader(&path).unwrap();
    let waiting = inbox::unended(&reader).unwrap();
    assert_eq!(waiting.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), [id.as_str()]);
    assert_eq!(inbox::body(&reader, &id).unwrap().unwrap().body.len(), 1000);
    // There is room again, and it ends.
    database.commit(&[&end(10)]).unwrap();
    assert_eq!(inbox::unended(&reader).unwrap(), []);
    assert_eq!(inbox::answer(&reader, &id, CREATED, 3).unwrap().unwrap().from(3), b"aaaaaaa");
    assert_eq!(inbox::answer_bytes(&reader, &id, CREATED).unwrap(), Some(10));
    assert_eq!(inbox::answer_bytes(&reader, &id, CREATED + 1).unwrap(), None, "begun anew");
}

#[test]
fn what_waits_makes_no_room_for_others() {
    let (_folder, path) = folder();
    let max = 400 << 10;
    let mut database = Database::open(&path, max).unwrap();
    database.commit(&[&insert_request(0, 70 << 10)]).unwrap();
    for number in 1..20 {
        database.commit(&[&insert_request(number, 20 << 10)]).unwrap();
        let part = AnswerPart { start: 0, bytes: vec![b'a'; 20 << 10] };
        let (state, id) = (InboxState::Done, request(number, 0).0.id);
        let end = InboxChange::End { id, state, now: 1, head: "{}".into(), part };
        database.commit(&[&Change::Inbox(end)]).unwrap();
    }
    let refused = database.commit(&[&insert_request(99, 350 << 10)]);
    assert!(matches!(refused, Err(ResponseStoreError::InboxFull { .. })), "{refused:?}");
    let reader = database::open_reader(&path).unwrap();
    assert_eq!(inbox::unended(&reader).unwrap().len(), 1);
    // The oldest that have ended are gone, and their keys are free again.
    assert_eq!(inbox::request_with_key(&reader, "o", "k1").unwrap(), None);
    assert!(inbox::request_with_key(&reader, "o", "k19").unwrap().is_some());
    // What is too old goes, unless it waits.
    assert!(database.expire(CREATED + 1001, Duration::from_secs(1000), 64).unwrap() > 0);
    assert_eq!(inbox::request_with_key(&reader, "o", "k19").unwrap(), None);
    assert_eq!(inbox::unended(&reader).unwrap().len(), 1);
}

#[test]
fn an_inbox_torn_at_any_byte_has_what_was_whole() {
    let (folder, path) = folder();
    let mut database = Database::open(&path, 1 << 30).unwrap();
    for number in 0..20 {
        database.commit(&[&insert_request(number, 10)]).unwrap();
    }
    // As a killed process leaves it: the log is not merged.
    let (file, log) =
        (std::fs::read(&path).unwrap(), std::fs::read(format!("{}-wal", path.display())).unwrap());
    drop(database);
    let (mut before, mut seen) = (0, std::collections::BTreeSet::new());
    for cut in (0..=log.len()).step_by(509) {
        let torn = folder.path().join(format!("torn-{cut}.db"));
        std::fs::write(&torn, &file).unwrap();
        std::fs::write(format!("{}-wal", torn.display()), &log[..cut]).unwrap();
        drop(Database::open(&torn, 1 << 30).unwrap());
        let rows = inbox::unended(&database::open_reader(&torn).unwrap()).unwrap();
        // The first so many, and no half one.
        let ids: Vec<String> = (0..rows.len()).map(|number| request(number, 0).0.id).collect();
        assert_eq!(
            rows.iter().map(|row| &row.id).collect::<Vec<_>>(),
            ids.iter().collect::<Vec<_>>(),
            "{cut}"
        );
        assert!(rows.len() >= before, "{cut}");
        before = rows.len();
        seen.insert(before);
    }
    assert_eq!((seen.first(), before > 18, seen.len() > 15), (Some(&0), true, true), "{seen:?}");
}

#[tokio::test]
async fn runs_have_a_share_and_keep_what_they_made() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        ResponseStoreConfig { max_bytes: 4 << 20, ..ResponseStoreConfig::new(folder.path().join("r.db")) };
    let store = Arc::new(ResponseStore::open(&config).unwrap());
    let row = |id: &str, owner: &str, bytes: u64, ended: bool| RunRow {
        id: id.to_owned(),
        owner: owner.to_owned(),
        // What ended long ago is deleted by the store that is opened.
        created: crate::serving::unix_seconds(),
        ended,
        bytes,
        record: Bytes::from_static(b"{}"),
    };
    let made = |digest: &str, bytes: usize| {
        vec![Artifact { digest: digest.to_owned(), bytes: vec![b'x'; bytes].into() }]
    };
    let half = 512 << 10;
    store.insert_run(row("a", "ada", half, false), made("d1", half as usize)).await.unwrap();
    store.save_run(row("a", "ada", 2 * half, false), made("d2", half as usize)).await.unwrap();
    // A quarter of the store is one owner's, for all runs that have not ended.
    let more = store.insert_run(row("b", "ada", half, false), made("d1", half as usize)).await;
    assert_eq!(more, Err(ResponseStoreError::RunsFull { max: 1 << 20 }));
    store.insert_run(row("c", "bob", half, false), made("d1", half as usize)).await.unwrap();
    // How it ends takes no share, and gives it back.
    store.save_run(row("a", "ada", 2 * half, true), Vec::new()).await.unwrap();
    store.insert_run(row("b", "ada", half, false), made("d1", half as usize)).await.unwrap();
    assert_eq!(store.artifact_bytes("ada", "d2"), Ok(Some(half as usize)));
    assert_eq!(store.artifact("bob", "d2"), Ok(None), "it is another owner's");
    assert_eq!(store.run_artifact("c", "d1").unwrap().map(|bytes| bytes.len()), Some(half as usize));
    // What is gone is not brought back by what was on its way.
    store.delete_run("c").await.unwrap();
    assert_eq!(
        store.save_run(row("c", "bob", half, false), Vec::new()).await,
        Err(ResponseStoreError::Deleted)
    );
    assert_eq!((store.run_record("c"), store.artifact("bob", "d1")), (Ok(None), Ok(None)));
    let name = store.gateway_name().unwrap();
    drop(store);
    let store = ResponseStore::open(&config).unwrap();
    assert_eq!(store.gateway_name(), Ok(name), "a gateway that starts again knows its runs");
    assert_eq!(store.run_ids().unwrap(), ["a", "b"]);
}
