//! Agents' stores as programs of their own, that give, receive and remove a model, for `cargo xtask bench spread` in its
//! network namespaces, and for tests that kill them; and what the bench compares them with.
//!
//! ```text
//! make DIR MIB NODE…               identities of the nodes, and a model of so many MiB that `seed` has
//! fetch DIR NODE                   has NODE take the model from the folder it was made in
//! collect DIR NODE                 has NODE remove it
//! serve DIR NODE ADDRESS…          gives what NODE has, at each ip:port
//! pull DIR NODE PEER=FROM>TO…      receives the model as NODE over these ways, and tells seconds, CPU and bytes
//! pour FILE ADDRESS…               sendfile(2) of the file to whoever connects, again and again
//! drain MIB FROM>TO…               reads so many MiB of what is poured, from three connections a way
//! keep MIB FILE FROM>TO…           the same, and writes them into a file
//! ranges FILE ADDRESS…             the file over HTTP, with ranges
//! ```
//!
//! With `RUSSET_KILL=point:count` in its environment a program is killed when it comes to that point of the store for
//! that time; with `RUSSET_STOP` it is stopped there until somebody lets it go on; with `RUSSET_FULL` the disk is full
//! from then on.

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
