//! Budgets of one and of two gateways, in memory, with real journals.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use prometheus::Registry;
use rand::Rng as _;
use russet_crds::{BudgetLimit, BudgetPeriod, BudgetSpec, ModelPrice, Money, TokenPrice};
use russet_wire::event::Usage;

use super::*;

impl MemoryBudgets {
    pub(super) fn gateway(&self, journal: Option<&Path>) -> Arc<Budgets> {
        let metrics = Arc::new(Metrics::new(&Registry::new()).unwrap());
        Arc::new(Budgets::in_memory(self, journal, metrics))
    }

    fn get(&self, name: &str) -> Budget {
        self.objects.lock()[name].clone()
    }

    /// What its status says that was used, in its only window.
    pub(super) fn used(&self, name: &str) -> Amount {
        let status = self.get(name).status.unwrap_or_default();
        status.windows.iter().fold(Amount::ZERO, |sum, window| sum.plus(Amount::of(&window.used)))
    }
}

pub(super) fn budget(name: &str, limits: Vec<BudgetLimit>) -> Budget {
    let mut object = Budget::new(name, BudgetSpec { limits, ..BudgetSpec::default() });
    object.metadata.namespace = Some("home".into());
    object
}

pub(super) fn per_month(requests: Option<i64>, tokens: Option<i64>, money: Option<&str>) -> BudgetLimit {
    let money = money.map(|money| money.parse().unwrap());
    BudgetLimit { per: BudgetPeriod::Month, requests, tokens, money, joules: None }
}

pub(super) const ANNA: BudgetSubject<'static> =
    BudgetSubject { namespace: "home", key: Some("laptop"), owner: Some("anna"), route: Some("family") };

pub(super) fn bound(prompt_tokens: u64, answer_tokens: u32) -> RequestBound {
    RequestBound { prompt_tokens, answer_tokens: Some(answer_tokens) }
}

fn used(prompt_tokens: u32, completion_tokens: u32) -> Usage {
    Usage { prompt_tokens, completion_tokens, cached_tokens: 0 }
}

async fn refusal(budgets: &Arc<Budgets>, bound: RequestBound) -> GatewayError {
    match budgets.reserve(&[ANNA], bound).await {
        Err(error) => error,
        Ok(reservation) => panic!("it has a reservation: {}", reservation.is_some()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_thousand_requests_of_two_gateways_stay_within_it() {
    const LIMIT: i64 = 200_000;
    let folder = tempfile::tempdir().unwrap();
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(LIMIT), None)])]);
    let gateways: Vec<Arc<Budgets>> =
        (0..2).map(|number| memory.gateway(Some(&folder.path().join(format!("{number}.sqlite"))))).collect();
    // What runs and what ran, by the requests' own count.
    let (running, ran, most) =
        (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut requests = tokio::task::JoinSet::new();
    for number in 0..1000 {
        let budgets = gateways[number % 2].clone();
        let (running, ran, most) = (running.clone(), ran.clone(), most.clone());
        requests.spawn(async move {
            let (prompt, answer, cut) = {
                let mut random = rand::rng();
                (random.random_range(1..500_u32), random.random_range(1..2000_u32), random.random_bool(0.1))
            };
            let mut reservation = match budgets.reserve(&[ANNA], bound(prompt.into(), answer)).await {
                Ok(reservation) => reservation.unwrap(),
                Err(error) => {
                    assert_eq!(error.kind, ErrorKind::BudgetExceeded, "{error}");
                    return 1;
                }
            };
            let reserved = u64::from(prompt + answer);
            let now = running.fetch_add(reserved, Ordering::SeqCst) + reserved;
            most.fetch_max(now + ran.load(Ordering::SeqCst), Ordering::SeqCst);
            tokio::task::yield_now().await;
            let answered = answer / 2;
            ran.fetch_add(u64::from(prompt + answered), Ordering::SeqCst);
            running.fetch_sub(reserved, Ordering::SeqCst);
            if cut {
                // Its client leaves.
                reservation.note_prompt(prompt);
                reservation.note_answer(answered as usize);
                drop(reservation);
            } else {
                reservation.settle(used(prompt, answered));
            }
            0
        });
    }
    let mut refused = 0;
    while let Some(one) = requests.join_next().await {
        refused += one.unwrap();
        if refused % 10 == 3 {
            gateways[0].give_back().await;
            gateways[1].give_back().await;
        }
    }
    for _ in 0..3 {
        gateways[0].give_back().await;
        gateways[1].give_back().await;
    }
    let (ran, most) = (ran.load(Ordering::SeqCst), most.load(Ordering::SeqCst));
    println!(
        "{ran} of {LIMIT} tokens used, at most {most} reserved and used, {refused} refused, {} conflicts",
        memory.conflicts.load(Ordering::Relaxed)
    );
    assert!(refused > 0, "the test asks for more than there is");
    assert_eq!(memory.used("b").tokens, ran);
    assert!(ran <= LIMIT as u64);
    // Who was refused would not have had enough: the largest needs 2,500.
    assert!(ran + 2500 > LIMIT as u64 || refused < 500, "{ran}");
    // Nothing stays reserved, and a gateway that starts again knows the same.
    let status = memory.get("b").status.unwrap();
    for share in &status.windows[0].gateways {
        assert_eq!(share.granted.tokens, share.used.tokens, "{share:?}");
    }
    let names = [gateways[0].gateway.clone(), gateways[1].gateway.clone()];
    drop(gateways);
    let again: Vec<Arc<Budgets>> =
        (0..2).map(|number| memory.gateway(Some(&folder.path().join(format!("{number}.sqlite"))))).collect();
    assert_eq!([&again[0].gateway, &again[1].gateway], [&names[0], &names[1]]);
    let recovered: u64 =
        again.iter().flat_map(|one| one.recovered.values()).map(|amount| amount.tokens).sum();
    assert_eq!(recovered, ran);
}

/// Reserves and settles until it is killed, and says what it settled.
async fn write_until_killed(path: &Path) {
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(1_000_000_000), None)])]);
    let budgets = memory.gateway(Some(path));
    let mut requests = tokio::task::JoinSet::new();
    for number in 0..8_u32 {
        let budgets = budgets.clone();
        requests.spawn(async move {
            for round in 0.. {
                let prompt = 1 + number + round % 7;
                let reservation = budgets.reserve(&[ANNA], bound(100, 0)).await.unwrap().unwrap();
                println!("reserved");
                // The others have their turns, too.
                tokio::task::yield_now().await;
                reservation.settle(used(prompt, 0));
                println!("settled {prompt}");
                let _ = std::io::stdout().flush();
            }
        });
    }
    requests.join_next().await;
}

/// The variable that makes the test below the process that it kills.
const KILLED: &str = "RUSSET_KILLED_BUDGETS";

#[test]
fn a_killed_gateway_knows_what_it_granted() {
    if let Some(path) = std::env::var_os(KILLED) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        runtime.block_on(write_until_killed(Path::new(&path)));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut killed_in_flight = 0;
    for kill in 0..20 {
        let path = folder.path().join(format!("{kill}.sqlite"));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "budgets::tests::a_killed_gateway_knows_what_it_granted", "--nocapture"])
            .env(KILLED, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (mut settled, mut begun, mut ended) = (0_u64, 0_u64, 0_u64);
        let limit = 20 + kill * 13;
        let mut is_killed = false;
        for line in lines {
            match line.strip_prefix("settled ") {
                Some(tokens) => {
                    settled += tokens.parse::<u64>().unwrap();
                    ended += 1;
                }
                None => begun += u64::from(line == "reserved"),
            }
            if ended >= limit && !is_killed {
                child.kill().unwrap();
                is_killed = true;
            }
        }
        child.wait().unwrap();
        let (_, recovered) = Journal::open(&path, Timestamp::now().as_second()).unwrap();
        let total: u64 = recovered.used.values().map(|amount| amount.tokens).sum();
        // Each of the eight had at most one request in flight: settled or not, said or not.
        let cut = begun - ended;
        assert!(cut <= 8, "{cut}");
        assert!(total >= settled && total <= settled + 8 * 100, "{settled} said, {total} known");
        killed_in_flight += u64::from(total > settled);
        // Settled again, nothing changes.
        let (_, again) = Journal::open(&path, Timestamp::now().as_second()).unwrap();
        assert_eq!(again.used.values().map(|amount| amount.tokens).sum::<u64>(), total);
    }
    println!("{killed_in_flight} of 20 kills cut requests, which count with all that they reserved");
    assert!(killed_in_flight > 0);
}

#[tokio::test]
async fn what_a_crash_cut_counts_whole_and_the_rest_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.sqlite");
    let memory = MemoryBudgets::of([budget("b", vec![per_month(Some(10), Some(1000), None)])]);
    let first = memory.gateway(Some(&path));
    let done = first.reserve(&[ANNA], bound(10, 90)).await.unwrap().unwrap();
    done.settle(used(5, 20));
    // While it runs, what a crash would leave of it goes on in another process.
    let running = first.reserve(&[ANNA], bound(100, 200)).await.unwrap().unwrap();
    let left = copied(&path, folder.path());
    let second = memory.gateway(Some(&left));
    assert_eq!(second.gateway, first.gateway);
    assert_eq!(second.give_back().await, None);
    let amount = memory.used("b");
    assert_eq!((amount.requests, amount.tokens), (2, 325));
    let other = memory.gateway(None);
    let error = refusal(&other, bound(0, 676)).await;
    assert!(error.message.contains("325 are used, 675 are left, and this request may need 676"), "{error}");
    assert!(other.reserve(&[ANNA], bound(0, 675)).await.unwrap().is_some());
    // Nobody else gets the journal of a gateway that runs, nor its name.
    let twin = memory.gateway(Some(&path));
    assert!(twin.journal.is_none() && twin.gateway != first.gateway);
    drop(running);
}

/// A copy of a journal and of what belongs to it.
fn copied(path: &Path, folder: &Path) -> std::path::PathBuf {
    let copy = folder.join("copy.sqlite");
    for (name, bytes) in files_of(path) {
        std::fs::write(folder.join(name.replace(path.file_stem().unwrap().to_str().unwrap(), "copy")), bytes)
            .unwrap();
    }
    copy
}

#[tokio::test]
async fn after_a_reboot_all_that_was_granted_counts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.sqlite");
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(1000), None)])]);
    let first = memory.gateway(Some(&path));
    first.reserve(&[ANNA], bound(10, 90)).await.unwrap().unwrap().settle(used(5, 20));
    // An eighth of what was left is granted beyond the need.
    let copy = copied(&path, folder.path());
    let connection = rusqlite::Connection::open(&copy).unwrap();
    connection.execute("UPDATE gateway SET boot = 'another'", []).unwrap();
    drop(connection);
    let second = memory.gateway(Some(&copy));
    assert_eq!(second.give_back().await, None);
    assert_eq!(memory.used("b").tokens, 100 + 900 / 8);
    // Once it has counted, a restart changes nothing.
    drop(second);
    let third = memory.gateway(Some(&copy));
    assert!(!third.has_rebooted);
    assert_eq!(third.give_back().await, None);
    assert_eq!(memory.used("b").tokens, 100 + 900 / 8);
}

/// The names of a journal's files and what is in them: the tables, SQLite's log of them, and the journal's own logs.
fn files_of(path: &Path) -> Vec<(String, Vec<u8>)> {
    let (folder, stem) = (path.parent().unwrap(), path.file_stem().unwrap().to_str().unwrap());
    let names =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let own = names.filter(|name| name.starts_with(stem) && !name.ends_with("-shm"));
    let mut files: Vec<_> =
        own.map(|name| (name.clone(), std::fs::read(folder.join(&name)).unwrap())).collect();
    files.sort();
    files
}

#[tokio::test]
async fn a_journal_torn_at_any_byte_is_opened_or_kept_aside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.sqlite");
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(1000), None)])]);
    let first = memory.gateway(Some(&path));
    for _ in 0..5 {
        let done = first.reserve(&[ANNA], bound(10, 90)).await.unwrap().unwrap();
        done.settle(used(5, 20));
    }
    let copy = copied(&path, folder.path());
    // What a gateway that is killed leaves, most of it in the log; and what one that ended leaves.
    let killed = files_of(&copy);
    let connection = rusqlite::Connection::open(&copy).unwrap();
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(connection);
    let ended = files_of(&copy);
    let (mut whole, mut aside) = (0, 0);
    for files in [killed, ended] {
        for (torn, (_, bytes)) in files.iter().enumerate() {
            for length in (0..bytes.len()).step_by(397) {
                for (name, _) in files_of(&copy) {
                    std::fs::remove_file(folder.path().join(name)).unwrap();
                }
                for (number, (name, bytes)) in files.iter().enumerate() {
                    let mut bytes = if number == torn { bytes[..length].to_vec() } else { bytes.clone() };
                    // Where the head is whole, the rest is damaged in another way.
                    if number == torn && length % 2 == 1 {
                        bytes.extend((0..200).map(|_| rand::random::<u8>()));
                    }
                    std::fs::write(folder.path().join(name), bytes).unwrap();
                }
                let (_, recovered) = Journal::open(&copy, Timestamp::now().as_second()).unwrap();
                let total: u64 = recovered.used.values().map(|amount| amount.tokens).sum();
                assert!(total <= 5 * 100, "{total} after {length} bytes");
                aside += usize::from(files_of(&copy).iter().any(|(name, _)| name.contains(".damaged-")));
                whole += usize::from(recovered.gateway == first.gateway);
            }
        }
    }
    println!("{whole} opened, {aside} kept aside");
    assert!(whole > 0 && aside > 0);
}

#[tokio::test]
async fn scopes_choose_whose_requests_count() {
    let scoped = |name: &str, scope: BudgetScope| {
        let mut object = budget(name, vec![per_month(Some(1), None, None)]);
        object.spec.scope = scope;
        object
    };
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let memory = MemoryBudgets::of([
        scoped("all", BudgetScope::default()),
        scoped("keys", BudgetScope { keys: names(&["laptop", "phone"]), ..BudgetScope::default() }),
        scoped("bobs", BudgetScope { owners: names(&["bob"]), ..BudgetScope::default() }),
        scoped("route", BudgetScope { routes: names(&["family"]), ..BudgetScope::default() }),
        scoped(
            "both",
            BudgetScope { keys: names(&["phone"]), routes: names(&["family"]), ..BudgetScope::default() },
        ),
    ]);
    let budgets = memory.gateway(None);
    let nobody = BudgetSubject { namespace: "home", ..BudgetSubject::default() };
    for (subject, expected) in [
        (ANNA, &["all", "keys", "route"][..]),
        (BudgetSubject { key: Some("phone"), owner: None, ..ANNA }, &["all", "both", "keys", "route"]),
        (BudgetSubject { key: Some("x"), owner: Some("bob"), route: None, ..ANNA }, &["all", "bobs"]),
        (nobody, &["all"]),
        (BudgetSubject { namespace: "work", ..ANNA }, &[]),
    ] {
        let found = budgets.of(&[subject]).unwrap();
        let found: Vec<String> =
            found.iter().map(|entry| entry.accounts.lock().object.metadata.name.clone().unwrap()).collect();
        assert_eq!(found, expected, "{subject:?}");
    }
    // A Budget that cannot be read stops its namespace alone.
    let hidden = BTreeSet::from([("work".to_owned(), "odd".to_owned())]);
    budgets.apply(memory.objects.lock().values(), hidden);
    assert!(budgets.reserve(&[nobody], bound(1, 1)).await.is_ok());
    let error =
        budgets.reserve(&[BudgetSubject { namespace: "work", ..nobody }], bound(1, 1)).await.err().unwrap();
    assert!(error.message.contains("work/odd"), "{error}");
}

#[tokio::test]
async fn all_budgets_of_a_request_have_enough_or_none_pays() {
    let minute = BudgetLimit { per: BudgetPeriod::Minute, tokens: Some(50), ..BudgetLimit::default() };
    let memory = MemoryBudgets::of([
        budget("large", vec![per_month(None, Some(1000), None)]),
        budget("small", vec![per_month(None, Some(1000), None), minute]),
    ]);
    let budgets = memory.gateway(None);
    let error = refusal(&budgets, bound(20, 40)).await;
    // A minute is soon over, so clients may try again.
    assert_eq!(error.kind, ErrorKind::QuotaExceeded);
    assert!(error.retry_after.is_some_and(|wait| wait <= Duration::from_secs(60)));
    assert!(error.message.contains("home/small allows 50 tokens per Minute"), "{error}");
    // While requests come it keeps a little, and nothing afterwards.
    assert_eq!((budgets.give_back().await, budgets.give_back().await), (None, None));
    let status = memory.get("large").status.unwrap();
    assert_eq!(status.windows[0].gateways[0].granted.tokens, 0, "{status:?}");
    // Without a length of its own, an answer gets what is left.
    let open = RequestBound { prompt_tokens: 20, answer_tokens: None };
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(1000), None)])]);
    let budgets = memory.gateway(None);
    let reservation = budgets.reserve(&[ANNA], open).await.unwrap().unwrap();
    assert_eq!(reservation.answer_tokens(), 980);
    reservation.settle(used(20, 900));
    let error = refusal(&budgets, open).await;
    assert!(error.message.contains("80 are left"), "{error}");
    assert_eq!(error.kind, ErrorKind::BudgetExceeded);
    // So does one whose program always names the most, unless that is too short to be of use.
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(5000), None)])]);
    let budgets = memory.gateway(None);
    let reservation = budgets.reserve(&[ANNA], bound(1000, 32_000)).await.unwrap().unwrap();
    assert_eq!(reservation.answer_tokens(), 4000);
    reservation.settle(used(1000, 2000));
    assert_eq!(refusal(&budgets, bound(1000, 32_000)).await.kind, ErrorKind::BudgetExceeded);
    assert!(budgets.reserve(&[ANNA], bound(1000, 1000)).await.is_ok());
}

#[tokio::test]
async fn energy_is_charged_when_an_engine_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let limit = BudgetLimit { joules: Some(100), ..per_month(None, None, None) };
    // Another one counts the same requests, and no energy.
    let memory =
        MemoryBudgets::of([budget("b", vec![limit]), budget("c", vec![per_month(Some(99), None, None)])]);
    let path = |number: usize| folder.path().join(format!("{number}.sqlite"));
    let gateways = [memory.gateway(Some(&path(0))), memory.gateway(Some(&path(1)))];
    let ask = async |gateway: usize| gateways[gateway].reserve(&[ANNA], bound(10, 10)).await;
    let first = ask(0).await.unwrap().unwrap();
    let second = ask(1).await.unwrap().unwrap();
    let charge = first.energy_charge().unwrap();
    charge.charge(30_001);
    first.settle(used(1, 1));
    // An engine whose client has left may be done later than its request.
    charge.charge(29_999);
    ask(0).await.unwrap().unwrap().settle(used(0, 0));
    // The first round meets the other gateway's write.
    gateways[0].close().await;
    let counted = Amount { requests: 1, tokens: 2, money: 0, millijoules: 60_000 };
    assert_eq!(memory.used("b"), counted);
    assert_eq!(memory.used("c").millijoules, 0);
    assert_eq!(memory.get("b").status.unwrap().used.unwrap(), "60 of 100 joules per Month");
    // What runs together may go beyond; then nothing begins, at either gateway.
    second.energy_charge().unwrap().charge(45_500);
    second.settle(used(1, 1));
    for budgets in &gateways {
        budgets.close().await;
    }
    for budgets in &gateways {
        let error = refusal(budgets, bound(10, 10)).await;
        assert_eq!(error.kind, ErrorKind::BudgetExceeded);
        let expected =
            "Budget home/b allows 100 joules per Month: 105.5 are used, 0 are left; the next Month begins";
        assert!(error.message.contains(expected), "{error}");
    }
    // A gateway that starts again knows it, and so does one that was killed.
    let copy = copied(&path(0), folder.path());
    drop((gateways, charge));
    for path in [path(0), copy] {
        let again = memory.gateway(Some(&path));
        let recovered = again.recovered.values().map(|amount| amount.millijoules).max();
        assert_eq!(recovered, Some(60_000), "{path:?}");
    }
}

#[test]
fn journals_of_earlier_releases_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let now = Timestamp::now().as_second();
    let old = rusqlite::Connection::open(&path).unwrap();
    old.execute_batch(&format!(
        "CREATE TABLE gateway (name TEXT NOT NULL, boot TEXT NOT NULL);
         CREATE TABLE used (budget TEXT NOT NULL, per TEXT NOT NULL, start INTEGER NOT NULL, requests INTEGER NOT NULL,
             tokens INTEGER NOT NULL, money INTEGER NOT NULL, PRIMARY KEY (budget, per, start)) WITHOUT ROWID;
         CREATE TABLE reserved (id INTEGER NOT NULL, budget TEXT NOT NULL, per TEXT NOT NULL, start INTEGER NOT NULL,
             requests INTEGER NOT NULL, tokens INTEGER NOT NULL, money INTEGER NOT NULL,
             PRIMARY KEY (id, budget, per, start)) WITHOUT ROWID;
         INSERT INTO gateway VALUES ('gateway-old', 'boot');
         INSERT INTO used VALUES ('uid', 'Day', {now}, 3, 40, 5);
         INSERT INTO reserved VALUES (7, 'uid', 'Day', {now}, 1, 100, 0);
         CREATE TABLE log (number INTEGER PRIMARY KEY, entries TEXT NOT NULL);
         INSERT INTO log (entries) VALUES ('[{{\"Used\":{{\"id\":8,\"account\":[\"uid\",[\"Day\",{now}]],
             \"amount\":{{\"requests\":1,\"tokens\":10,\"money\":0}}}}}}]');"
    ))
    .unwrap();
    drop(old);
    for _ in 0..2 {
        let (_, recovered) = Journal::open(&path, now).unwrap();
        assert_eq!(recovered.gateway, "gateway-old");
        let used = recovered.used[&("uid".to_owned(), (BudgetPeriod::Day, now))];
        assert_eq!(used, Amount { requests: 5, tokens: 150, money: 5, millijoules: 0 });
    }
}

#[tokio::test]
async fn money_is_reserved_for_each_try_of_a_provider() {
    let price = |input: &str, output: &str| {
        let [input, output] = [input, output].map(|text| text.parse().unwrap());
        ModelPrice::from(TokenPrice { input, cached_input: Some("1".parse().unwrap()), output })
    };
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, None, Some("0.01"))])]);
    let budgets = memory.gateway(None);
    let mut reservation = budgets.reserve(&[ANNA], bound(1000, 1000)).await.unwrap().unwrap();
    assert!(reservation.counts_money());
    let dear = reservation.begin_attempt(price("10", "20")).await.unwrap_err();
    assert_eq!(dear.kind, ErrorKind::BudgetExceeded);
    assert!(dear.message.contains("0.01 are left, and this request may need 0.03"), "{dear}");
    reservation.begin_attempt(price("2", "4")).await.unwrap();
    // That one fails, and the next one answers.
    reservation.end_attempt();
    reservation.begin_attempt(price("2", "8")).await.unwrap();
    reservation.settle(Usage { prompt_tokens: 900, completion_tokens: 100, cached_tokens: 400 });
    assert_eq!(budgets.give_back().await, None);
    let cost: Money = "0.0022".parse().unwrap();
    assert_eq!(memory.used("b"), Amount { requests: 1, tokens: 1000, money: cost.nanos, millijoules: 0 });
    // What this cluster answers costs nothing, and a client that left before the end pays for what it got.
    let free = budgets.reserve(&[ANNA], bound(1000, 1000)).await.unwrap().unwrap();
    free.settle(used(1000, 1000));
    let mut cut = budgets.reserve(&[ANNA], bound(1000, 1000)).await.unwrap().unwrap();
    cut.begin_attempt(price("2", "5")).await.unwrap();
    cut.note_answer(200);
    drop(cut);
    assert_eq!(budgets.give_back().await, None);
    let cost: Money = "0.0052".parse().unwrap();
    assert_eq!(memory.used("b"), Amount { requests: 3, tokens: 4200, money: cost.nanos, millijoules: 0 });
    // Neither engine nor provider took it: nothing counts.
    drop(budgets.reserve(&[ANNA], bound(1000, 1000)).await.unwrap());
    assert_eq!(budgets.give_back().await, None);
    assert_eq!(memory.used("b").requests, 3);
}

#[tokio::test]
async fn a_fee_per_request_is_reserved_and_settled() {
    let fee: Money = "0.006".parse().unwrap();
    let price = ModelPrice { request: fee, ..ModelPrice::default() };
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, None, Some("0.01"))])]);
    let budgets = memory.gateway(None);
    let mut first = budgets.reserve(&[ANNA], bound(10, 10)).await.unwrap().unwrap();
    let mut second = budgets.reserve(&[ANNA], bound(10, 10)).await.unwrap().unwrap();
    first.begin_attempt(price).await.unwrap();
    let refused = second.begin_attempt(price).await.unwrap_err();
    assert!(refused.message.contains("0.004 are left, and this request may need 0.006"), "{refused}");
    // A try that fails before its answer costs no fee, and an answer costs one, however many tries there were.
    first.end_attempt();
    second.begin_attempt(price).await.unwrap();
    second.end_attempt();
    second.begin_attempt(price).await.unwrap();
    second.settle(used(3, 1));
    drop(first);
    assert_eq!(budgets.give_back().await, None);
    assert_eq!(memory.used("b"), Amount { requests: 1, tokens: 4, money: fee.nanos, millijoules: 0 });
}

#[tokio::test]
async fn without_the_api_server_grants_are_used_up_and_no_more() {
    let memory = MemoryBudgets::of([budget("b", vec![per_month(Some(80), None, None)])]);
    let budgets = memory.gateway(None);
    let first = budgets.reserve(&[ANNA], bound(1, 1)).await.unwrap();
    memory.is_down.store(true, Ordering::Relaxed);
    let mut more = Vec::new();
    let error = loop {
        match budgets.reserve(&[ANNA], bound(1, 1)).await {
            Ok(reservation) => more.push(reservation),
            Err(error) => break error,
        }
        assert!(more.len() < 80);
    };
    // An eighth of what was left was granted with the first.
    assert_eq!(more.len(), 9);
    assert_eq!(error.kind, ErrorKind::ModelNotReady);
    assert!(error.message.contains("home/b: it is down"), "{error}");
    memory.is_down.store(false, Ordering::Relaxed);
    assert!(budgets.reserve(&[ANNA], bound(1, 1)).await.is_ok());
    drop((first, more));
}

#[tokio::test]
async fn statuses_say_what_is_used_and_what_is_near() {
    let memory = MemoryBudgets::of([budget("b", vec![per_month(Some(10), Some(1000), Some("5"))])]);
    let budgets = memory.gateway(None);
    for (requests, text, near, exhausted) in [
        (1, "1 of 10 requests per Month", "False", "False"),
        (7, "8 of 10 requests per Month", "True", "False"),
        (2, "10 of 10 requests per Month", "True", "True"),
    ] {
        for _ in 0..requests {
            let reservation = budgets.reserve(&[ANNA], bound(10, 10)).await.unwrap().unwrap();
            reservation.settle(used(10, 10));
        }
        assert_eq!(budgets.give_back().await, None);
        let status = memory.get("b").status.unwrap();
        let condition =
            |name: &str| status.conditions.iter().find(|one| one.type_ == name).unwrap().status.clone();
        assert_eq!(status.used.as_deref(), Some(text));
        assert_eq!((condition("NearLimit").as_str(), condition("Exhausted").as_str()), (near, exhausted));
        assert_eq!(condition("Ready"), "True");
    }
    // Nothing new is written where nothing changed.
    assert_eq!(budgets.give_back().await, None);
    let version = memory.get("b").metadata.resource_version;
    assert_eq!(budgets.give_back().await, None);
    assert_eq!(memory.get("b").metadata.resource_version, version);
    // More is allowed: the limit that was raised holds at once, and one that is lowered refuses.
    let mut raised = memory.get("b");
    raised.spec.limits[0].requests = Some(12);
    raised.metadata.resource_version = Some("100".into());
    memory.objects.lock().insert("b".into(), raised.clone());
    budgets.apply([&raised].into_iter(), BTreeSet::new());
    assert!(budgets.reserve(&[ANNA], bound(10, 10)).await.is_ok());
    let mut lowered = memory.get("b");
    lowered.spec.limits[0].requests = Some(3);
    budgets.apply([&lowered].into_iter(), BTreeSet::new());
    let error = refusal(&budgets, bound(10, 10)).await;
    assert!(error.message.contains("allows 3 requests per Month"), "{error}");
}

#[tokio::test]
async fn a_request_that_leaves_while_it_waits_keeps_nothing() {
    let memory = MemoryBudgets::of([
        budget("first", vec![per_month(None, Some(1000), None)]),
        budget("second", vec![per_month(None, Some(1000), None)]),
    ]);
    let (here, there) = (memory.gateway(None), memory.gateway(None));
    // The other gateway has all of the second, so a request here waits for it, with its part of the first.
    let elsewhere = BudgetSubject { namespace: "home", ..BudgetSubject::default() };
    let held = there
        .hold_all(&there.of(&[elsewhere]).unwrap()[1..], Amount { tokens: 1000, ..Amount::ZERO })
        .await
        .unwrap();
    let waiting = here.reserve(&[ANNA], bound(500, 100));
    assert!(tokio::time::timeout(Duration::from_millis(50), waiting).await.is_err(), "it waits");
    drop(held);
    assert_eq!((there.give_back().await, there.give_back().await), (None, None));
    // A look that is due reads what the other gave back.
    let all = here.reserve(&[ANNA], bound(900, 100)).await.unwrap().unwrap();
    drop(all);
    assert_eq!((here.give_back().await, here.give_back().await), (None, None));
    for name in ["first", "second"] {
        let granted: i64 = memory.get(name).status.unwrap().windows[0]
            .gateways
            .iter()
            .map(|share| share.granted.tokens)
            .sum();
        assert_eq!(granted, 0, "{name}");
    }
}

#[tokio::test]
async fn a_budget_that_is_created_anew_begins_anew() {
    let memory = MemoryBudgets::of([budget("b", vec![per_month(Some(5), None, None)])]);
    let budgets = memory.gateway(None);
    let old = budgets.reserve(&[ANNA], bound(1, 1)).await.unwrap().unwrap();
    let mut anew = budget("b", vec![per_month(Some(5), None, None)]);
    anew.metadata.uid = Some("another".into());
    anew.metadata.resource_version = Some("9".into());
    memory.objects.lock().insert("b".into(), anew.clone());
    budgets.apply([&anew].into_iter(), BTreeSet::new());
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(budgets.reserve(&[ANNA], bound(1, 1)).await.unwrap().unwrap());
    }
    old.settle(used(1, 1));
    assert_eq!(refusal(&budgets, bound(1, 1)).await.kind, ErrorKind::BudgetExceeded);
    for reservation in all {
        reservation.settle(used(1, 1));
    }
    assert_eq!(budgets.give_back().await, None);
    assert_eq!(memory.used("b").requests, 5);
}
