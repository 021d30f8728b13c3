//! Starts a cluster for the tests of the client packages, which are not written in Rust.
//!
//! ```text
//! $ tidegate-test-cluster redis            # or valkey
//! 127.0.0.1:40001 127.0.0.1:40002 127.0.0.1:40003
//! ```
//!
//! Prints the addresses of the three masters in one line when the cluster serves all slots. Exits and stops all servers
//! when standard input is closed. Each line of standard input changes the slot of a key, and is answered with `ok`:
//!
//! - `begin-move KEY` starts to move the slot to another master. No keys are moved yet.
//! - `end-move KEY` moves the keys, and makes the other master the owner of the slot.
//! - `drop-slot KEY` takes the slot from its owner. Commands on its keys fail with `CLUSTERDOWN`.
//! - `restore-slot KEY` returns the slot to its owner.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::process::ExitCode;

use tidegate_testkit::server::{Brand, Cluster, Server};

fn main() -> ExitCode {
    let brand = match std::env::args().nth(1).as_deref() {
        Some("redis") => Brand::Redis,
        Some("valkey") => Brand::Valkey,
        _ => {
            eprintln!("usage: tidegate-test-cluster redis|valkey");
            return ExitCode::FAILURE;
        }
    };
    let cluster = Cluster::start(brand);
    let addresses: Vec<String> = cluster.masters().into_iter().map(|node| node.addr().to_string()).collect();
    print_line(&addresses.join(" "));
    let mut owners_of_dropped = HashMap::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        run(&cluster, &mut owners_of_dropped, &line);
        print_line("ok");
    }
    ExitCode::SUCCESS
}

/// Runs a command. Panics if it is malformed, or a node refuses it, which ends the process and all servers.
fn run<'c>(cluster: &'c Cluster, owners_of_dropped: &mut HashMap<u16, &'c Server>, line: &str) {
    let (command, key) = line.split_once(' ').expect("a command and a key");
    let slot = cluster.slot_of(key);
    match command {
        "begin-move" => cluster.begin_move(slot, other_master(cluster, slot)),
        "end-move" => {
            let target = other_master(cluster, slot);
            cluster.move_keys(slot, target, |_| true);
            cluster.end_move(slot, target);
        }
        "drop-slot" => {
            owners_of_dropped.insert(slot, cluster.drop_slot(slot));
        }
        "restore-slot" => {
            let owner = owners_of_dropped.remove(&slot).expect("a slot that was dropped");
            cluster.restore_slot(slot, owner);
        }
        _ => panic!("unknown command {command}; expected begin-move, end-move, drop-slot or restore-slot"),
    }
}

/// Returns the first master that does not own the slot.
fn other_master(cluster: &Cluster, slot: u16) -> &Server {
    let owner = cluster.owner_of(slot).port();
    cluster.masters().into_iter().find(|node| node.port() != owner).expect("a second master")
}

/// Prints a line at once. An error is ignored: the test that would read the line has ended.
fn print_line(text: &str) {
    let mut output = io::stdout().lock();
    let _ = writeln!(output, "{text}").and_then(|()| output.flush());
}
