//! Agents' stores as separate programs that serve, download and remove a model, for `cargo xtask bench
//! spread` in its network namespaces and for tests that kill them; and the baselines of the bench.
//!
//! ```text
//! make DIR MIB NODE…               identities of the nodes, and a model of this many MiB on `seed`
//! fetch DIR NODE                   has NODE fetch the model from the directory it was made in
//! collect DIR NODE                 has NODE remove it
//! serve DIR NODE ADDRESS…          serves NODE's models at each ip:port
//! pull DIR NODE PEER=FROM>TO…      downloads the model as NODE over these paths; prints time, CPU and bytes
//! pour FILE ADDRESS…               sendfile(2) of the file to every client, again and again
//! drain MIB FROM>TO…               reads this many MiB from `pour`, over three connections per path
//! keep MIB FILE FROM>TO…           the same, and writes them into a file
//! ranges FILE ADDRESS…             the file over HTTP, with ranges
//! ```
//!
//! `RUSSET_KILL=point:count` in its environment kills a program when it reaches that point of the store for
//! that time; `RUSSET_STOP` stops it there until it gets SIGCONT; with `RUSSET_FULL` the disk is full from
//! then on.

#[cfg(target_os = "linux")]
#[path = "spread/programs.rs"]
mod programs;

#[cfg(target_os = "linux")]
fn main() {
    programs::main();
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("network namespaces and sendfile to sockets are Linux's");
    std::process::exit(2);
}
