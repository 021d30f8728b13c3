//! A real Redis or Valkey Cluster for tests: three masters, each with a replica.
//!
//! ```no_run
//! use tidegate_testkit::server::{Brand, Cluster};
//!
//! let cluster = Cluster::start(Brand::Redis);
//! let (slot, owner) = (cluster.slot_of("{user:42}"), cluster.owner_of(7_000));
//! let target = cluster.masters().into_iter().find(|node| node.port() != owner.port()).unwrap();
//! cluster.move_slots(&[slot], target); // resharding, as `redis-cli --cluster reshard` does it
//! owner.kill9(); // its replica is promoted after the node timeout
//! ```
//!
//! **Slots.** The first master has the slots 0 to 5460, the second those to 10922, the third the rest, as `redis-cli
//! --cluster create` would assign them. A lost master does not stop the others (`cluster-require-full-coverage no`).
//!
//! **A slot that is being moved** has three stages, each of which a test can hold: after [`Cluster::begin_move`] both
//! nodes know of the move, [`Cluster::move_keys`] moves some or all keys, and [`Cluster::end_move`] assigns the slot to
//! the target.
//!
//! **Shared.** Starting six servers takes a second or two. Tests that leave the topology as it is can use
//! [`Cluster::shared`], with keys of their own.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use super::{Brand, Config, Connection, Reply, Server};
use crate::poll::{eventually, poll};

/// The number of masters, and of replicas.
const SHARDS: usize = 3;
/// The number of hash slots of a cluster.
pub const SLOTS: u16 = 16_384;
/// The timeout of `MIGRATE`, in milliseconds.
const MIGRATE_TIMEOUT_MS: &str = "10000";

/// A running cluster. Dropping it ends all servers; if its thread panics, the end of each log is printed.
#[derive(Debug)]
pub struct Cluster {
    /// The settings of each node.
    config: Config,
    nodes: Vec<Server>,
}

/// A cluster that all tests of a binary share. If it is dropped while its thread panics, the logs are printed.
#[derive(Debug)]
pub struct SharedCluster(&'static Cluster);

impl std::ops::Deref for SharedCluster {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        self.0
    }
}

impl Drop for SharedCluster {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.nodes.iter().for_each(|node| eprintln!("{}", node.log_end()));
        }
    }
}

impl Cluster {
    /// Starts a cluster and waits until it serves all slots and all replicas are in sync.
    ///
    /// A master counts as failed after 5 seconds.
    ///
    /// # Panics
    /// If a server does not start, or the cluster is not complete within about 30 seconds.
    pub fn start(brand: Brand) -> Cluster {
        Cluster::with(&Config::new(brand))
    }

    /// Starts a cluster like [`Cluster::start`], with the settings of `config` on each node.
    ///
    /// # Panics
    /// If a server does not start, or the cluster is not complete within about 30 seconds.
    pub fn with(config: &Config) -> Cluster {
        // The settings of the caller come last, so that they override these.
        let mut own = Config::new(config.brand)
            .set("cluster-enabled", "yes")
            .set("cluster-node-timeout", "5000")
            .set("cluster-require-full-coverage", "no")
            .set("cluster-replica-validity-factor", "0")
            .set("cluster-allow-replica-migration", "no");
        own.settings.extend(config.settings.iter().cloned());
        own.environment.clone_from(&config.environment);
        own.has_tls = config.has_tls;
        if own.has_tls {
            // Clients with TLS then get the nodes' TLS ports, and others the plain ones.
            own = own.set("tls-cluster", "yes").set("tls-replication", "yes");
        }
        let starting: Vec<_> = (0..2 * SHARDS)
            .map(|_| {
                let own = own.clone();
                thread::spawn(|| own.start())
            })
            .collect();
        let nodes = starting.into_iter().map(|node| node.join().expect("a server that starts")).collect();
        let cluster = Cluster { config: own, nodes };
        cluster.join_nodes();
        cluster
    }

    /// Returns the cluster of this brand that all tests of this binary share, and starts it if this is the first call.
    ///
    /// Its topology must not be changed.
    ///
    /// # Panics
    /// See [`Cluster::start`].
    pub fn shared(brand: Brand) -> SharedCluster {
        static CLUSTERS: [OnceLock<Cluster>; 2] = [OnceLock::new(), OnceLock::new()];
        static STARTING: Mutex<()> = Mutex::new(());
        // One after the other: two clusters that start at once are slower than one after the other.
        let _one_at_a_time = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let index = Brand::ALL.iter().position(|&other| other == brand).expect("a known brand");
        SharedCluster(CLUSTERS[index].get_or_init(|| Cluster::start(brand)))
    }

    /// Starts another master, which has no slots, and waits until all nodes know it. It is the last of [`Cluster::nodes`].
    ///
    /// # Panics
    /// If the server does not start, or is not known to all nodes within about 30 seconds.
    pub fn add_master(&mut self) {
        self.nodes.push(self.config.clone().start());
        self.nodes[self.nodes.len() - 1].meet(&self.nodes[0]);
        self.wait_until_all_know_each_other();
        // A new node rejects keys until it knows that all slots have an owner.
        self.wait_until_complete();
    }

    /// Removes a node that has no slots from the cluster, and ends it.
    ///
    /// # Panics
    /// If another node does not forget it.
    pub fn remove(&mut self, index: usize) {
        let removed = self.nodes.remove(index);
        let id = id_of(&removed);
        removed.kill9();
        self.running().iter().for_each(|node| expect_ok(node.command(&["CLUSTER", "FORGET", &id])));
    }

    fn wait_until_all_know_each_other(&self) {
        let known = |node: &Server| info(node, "cluster_known_nodes");
        let all = self.nodes.len().to_string();
        for node in &self.nodes {
            eventually("all nodes know each other", || known(node), |known| *known == all);
        }
    }

    /// Assigns the slots, introduces the nodes to each other, attaches the replicas, and waits until all agree.
    fn join_nodes(&self) {
        let shard = usize::from(SLOTS).div_ceil(SHARDS);
        for (index, master) in self.nodes[..SHARDS].iter().enumerate() {
            let (first, end) = (index * shard, ((index + 1) * shard).min(usize::from(SLOTS)));
            expect_ok(master.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]));
            expect_ok(master.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &(end - 1).to_string()]));
        }
        for node in &self.nodes[1..] {
            node.meet(&self.nodes[0]);
        }
        self.wait_until_all_know_each_other();
        for (master, replica) in self.nodes.iter().zip(&self.nodes[SHARDS..]) {
            let id = id_of(master);
            // Refused while the replica has not heard of the master's slots.
            assert!(poll(|| replica.command(&["CLUSTER", "REPLICATE", &id]).error().is_none()), "CLUSTER REPLICATE");
        }
        self.wait_until_complete();
    }

    /// Waits until every running node serves all slots, agrees with the others about their owners, and, if it is a
    /// replica, is in sync with its master.
    ///
    /// # Panics
    /// If that takes longer than about 30 seconds.
    pub fn wait_until_complete(&self) {
        for node in self.running() {
            eventually("the cluster is complete", || info(node, "cluster_slots_ok"), |ok| *ok == SLOTS.to_string());
            eventually("the cluster is up", || info(node, "cluster_state"), |state| state == "ok");
            let in_sync = || node.command(&["INFO", "replication"]).text();
            eventually("replicas are in sync", in_sync, |info| {
                info.contains("role:master") || info.contains("master_link_status:up")
            });
        }
        self.wait_until_agreed();
    }

    /// Waits until every running node has the same owners of slots, masters and configuration epochs.
    ///
    /// A node that takes a slot gives itself the next epoch. If it does not know the latest one, two masters have the
    /// same epoch, and one of them may then claim the slot again, or both may redirect to each other for ever.
    ///
    /// # Panics
    /// If that takes longer than about 30 seconds.
    fn wait_until_agreed(&self) {
        let views = || self.running().into_iter().map(|node| (owners(node), masters_of(node))).collect::<Vec<_>>();
        eventually("all nodes agree", views, |views| views.windows(2).all(|pair| pair[0] == pair[1]));
    }

    /// Returns `redis+cluster://` with the addresses of the first two nodes.
    pub fn url(&self) -> String {
        format!("redis+cluster://{},{}", self.nodes[0].addr(), self.nodes[1].addr())
    }

    /// Returns `rediss+cluster://` with the TLS addresses of the first two nodes.
    ///
    /// # Panics
    /// If the nodes were configured without [`Config::tls`].
    pub fn tls_url(&self) -> String {
        format!("rediss+cluster://127.0.0.1:{},127.0.0.1:{}", self.nodes[0].tls_port(), self.nodes[1].tls_port())
    }

    /// Returns all nodes. The first three were masters at the start, and node n + 3 the replica of node n.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Returns the nodes whose process runs and is not stopped.
    pub fn running(&self) -> Vec<&Server> {
        self.nodes.iter().filter(|node| node.connect().is_ok()).collect()
    }

    /// Returns the running nodes that are masters at the moment and have slots.
    pub fn masters(&self) -> Vec<&Server> {
        let is_owner = |node: &&Server| {
            let ours = node.command(&["CLUSTER", "NODES"]).text();
            ours.lines().any(|line| line.contains("myself,master") && line.split(' ').count() > 8)
        };
        self.running().into_iter().filter(is_owner).collect()
    }

    /// Returns the slot of a key.
    pub fn slot_of(&self, key: &str) -> u16 {
        let running = self.running();
        let reply = running[0].command(&["CLUSTER", "KEYSLOT", key]);
        u16::try_from(reply.integer()).expect("a slot")
    }

    /// Returns the node that owns a slot, in the view of the first running node.
    ///
    /// # Panics
    /// If no node owns it.
    pub fn owner_of(&self, slot: u16) -> &Server {
        let running = self.running();
        let port = owners(running[0]).into_iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        let (.., port) = port.expect("an owner of the slot");
        self.nodes.iter().find(|node| node.port() == port).expect("a node of this cluster")
    }

    /// Tells the owner of the slot and `target` that the slot is being moved. Its keys stay where they are.
    ///
    /// # Panics
    /// If a node refuses it.
    pub fn begin_move(&self, slot: u16, target: &Server) {
        self.wait_until_agreed();
        let (source, slot) = (self.owner_of(slot), slot.to_string());
        expect_ok(target.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id_of(source)]));
        expect_ok(source.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id_of(target)]));
    }

    /// Moves the keys of a slot for which `moves` returns `true` to `target`. Returns their number.
    ///
    /// # Panics
    /// If `MIGRATE` fails.
    pub fn move_keys(&self, slot: u16, target: &Server, moves: impl Fn(&str) -> bool) -> usize {
        let source = self.owner_of(slot);
        let keys = source.command(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "100000"]);
        let keys: Vec<String> = keys.items().iter().map(Reply::text).filter(|key| moves(key)).collect();
        if !keys.is_empty() {
            migrate(source, target, &keys);
        }
        keys.len()
    }

    /// Assigns a slot to `target`, and tells all masters.
    ///
    /// # Panics
    /// If a node refuses it, because it still has keys of the slot.
    pub fn end_move(&self, slot: u16, target: &Server) {
        let (source, id, slot) = (self.owner_of(slot), id_of(target), slot.to_string());
        let others = self.masters().into_iter().filter(|node| ![source.port(), target.port()].contains(&node.port()));
        for node in [target, source].into_iter().chain(others) {
            expect_ok(node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]));
        }
    }

    /// Takes a slot from its owner, so that no node serves it, and returns the owner. Its keys stay in the owner's memory.
    ///
    /// # Panics
    /// If the owner refuses it.
    pub fn drop_slot(&self, slot: u16) -> &Server {
        let owner = self.owner_of(slot);
        expect_ok(owner.command(&["CLUSTER", "DELSLOTS", &slot.to_string()]));
        owner
    }

    /// Returns a slot to the owner from which [`Cluster::drop_slot`] took it, and waits until all nodes know.
    ///
    /// # Panics
    /// If the owner refuses it, or the cluster is not complete within about 30 seconds.
    pub fn restore_slot(&self, slot: u16, owner: &Server) {
        expect_ok(owner.command(&["CLUSTER", "ADDSLOTS", &slot.to_string()]));
        self.wait_until_complete();
    }

    /// Moves slots that have the same owner to `target`, with all their keys, in one pipeline per stage.
    ///
    /// # Panics
    /// If the slots have several owners, or a node refuses a stage.
    pub fn move_slots(&self, slots: &[u16], target: &Server) {
        let Some(&first) = slots.first() else { return };
        self.wait_until_agreed();
        let source = self.owner_of(first);
        let (source_id, target_id) = (id_of(source), id_of(target));
        let set = |node: &Server, stage: &str, id: &str| {
            let command = |slot: &u16| ["CLUSTER", "SETSLOT", &slot.to_string(), stage, id].map(str::to_owned).to_vec();
            pipeline(node, &slots.iter().map(command).collect::<Vec<_>>()).into_iter().for_each(expect_ok);
        };
        set(target, "IMPORTING", &source_id);
        set(source, "MIGRATING", &target_id);
        let list = |slot: &u16| ["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "100000"].map(str::to_owned).to_vec();
        for keys in pipeline(source, &slots.iter().map(list).collect::<Vec<_>>()) {
            let keys: Vec<String> = keys.items().iter().map(Reply::text).collect();
            if !keys.is_empty() {
                migrate(source, target, &keys);
            }
        }
        // The target first: a source that has given up a slot redirects its clients there.
        set(target, "NODE", &target_id);
        set(source, "NODE", &target_id);
        for node in self.masters().into_iter().filter(|node| ![source.port(), target.port()].contains(&node.port())) {
            set(node, "NODE", &target_id);
        }
    }

    /// Moves ranges of slots from `source` to `target` with `CLUSTER MIGRATESLOTS`, which only Valkey has, and waits until
    /// they have moved.
    ///
    /// # Panics
    /// If `source` refuses it, or a migration fails, or takes longer than about 30 seconds.
    pub fn migrate_slots(&self, slots: std::ops::RangeInclusive<u16>, source: &Server, target: &Server) {
        let (first, last) = (slots.start().to_string(), slots.end().to_string());
        expect_ok(source.command(&["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", &first, &last, "NODE", &id_of(target)]));
        let moved = || (owners(target), format!("{:?}", source.command(&["CLUSTER", "GETSLOTMIGRATIONS"])));
        eventually("the slots have moved", moved, |(owners, migrations)| {
            assert!(!migrations.contains("failed"), "{migrations}");
            let is_moved = |slot: u16| {
                owners.iter().any(|(first, last, port)| (*first..=*last).contains(&slot) && *port == target.port())
            };
            slots.clone().all(is_moved)
        });
    }

    /// Promotes a replica with `CLUSTER FAILOVER`, and waits until it is a master. Its old master becomes its replica.
    ///
    /// # Panics
    /// If the node is not a replica, or does not become a master within about 30 seconds.
    pub fn fail_over_to(&self, replica: &Server) {
        expect_ok(replica.command(&["CLUSTER", "FAILOVER"]));
        self.wait_until_master(replica);
    }

    /// Waits until a node is a master.
    ///
    /// # Panics
    /// If that takes longer than about 30 seconds.
    pub fn wait_until_master(&self, node: &Server) {
        let role = || node.command(&["ROLE"]).items()[0].text();
        eventually("the replica is promoted", role, |role| role == "master");
    }
}

impl Server {
    /// Introduces this node to the cluster of `other`.
    fn meet(&self, other: &Server) {
        let port = self.tls_port.unwrap_or(self.port).to_string();
        expect_ok(other.command(&["CLUSTER", "MEET", "127.0.0.1", &port]));
    }
}

/// Moves keys from `source` to `target`.
///
/// # Panics
/// If `MIGRATE` fails.
fn migrate(source: &Server, target: &Server, keys: &[String]) {
    let port = target.port().to_string();
    let head = ["MIGRATE", "127.0.0.1", &port, "", "0", MIGRATE_TIMEOUT_MS, "KEYS"];
    let reply = source.command(&head.into_iter().chain(keys.iter().map(String::as_str)).collect::<Vec<_>>());
    // NOKEY: all of them have expired.
    assert!(matches!(reply.text().as_str(), "OK" | "NOKEY"), "{reply:?}");
}

/// Sends all commands on one connection, then reads their replies.
fn pipeline(node: &Server, commands: &[Vec<String>]) -> Vec<Reply> {
    let run = |connection: &mut Connection| {
        commands.iter().try_for_each(|command| connection.send(command))?;
        commands.iter().map(|_| connection.receive()).collect()
    };
    node.connect().and_then(|mut connection| run(&mut connection)).unwrap_or_else(|error| panic!("no reply: {error}"))
}

fn id_of(node: &Server) -> String {
    node.command(&["CLUSTER", "MYID"]).text()
}

/// Returns the value of a field of `CLUSTER INFO`, such as `cluster_state`.
///
/// # Panics
/// If the reply has no such field.
fn info(node: &Server, field: &str) -> String {
    let info = node.command(&["CLUSTER", "INFO"]).text();
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_else(|| panic!("no {field} in {info}")).to_owned()
}

/// Returns the slot ranges that `node` knows, in order: first slot, last slot, and the port of the owner.
fn owners(node: &Server) -> Vec<(u16, u16, u16)> {
    let number = |reply: &Reply| u16::try_from(reply.integer()).expect("a slot or a port");
    let ranges = node.command(&["CLUSTER", "SLOTS"]);
    let range = |range: &Reply| {
        let [first, last, owner, ..] = range.items() else { panic!("a range and its owner, not {range:?}") };
        (number(first), number(last), number(&owner.items()[1]))
    };
    let mut ranges: Vec<_> = ranges.items().iter().map(range).collect();
    ranges.sort_unstable();
    ranges
}

/// Returns the ids of all nodes that `node` knows, each with that of its master (`-` for a master) and the configuration
/// epoch of its master.
///
/// A master starts a failover only if it knows that the replica is one of its own.
fn masters_of(node: &Server) -> Vec<[String; 3]> {
    let nodes = node.command(&["CLUSTER", "NODES"]).text();
    let field = |line: &str, index: usize| line.split(' ').nth(index).unwrap_or_default().to_owned();
    let mut masters: Vec<_> = nodes.lines().map(|line| [0, 3, 6].map(|index| field(line, index))).collect();
    masters.sort_unstable();
    masters
}

fn expect_ok(reply: Reply) {
    assert_eq!(reply, Reply::Simple("OK".into()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_of_each_brand_serves_all_slots_and_moves_some() {
        for brand in Brand::ALL {
            let cluster = Cluster::start(brand);
            assert_eq!(cluster.masters().len(), SHARDS, "{brand}");
            let slot = cluster.slot_of("{a}");
            let source = cluster.owner_of(slot);
            assert_eq!(source.command(&["SET", "{a}1", "x"]).text(), "OK");
            source.command(&["SET", "{a}2", "y"]);
            let target = cluster.masters().into_iter().find(|node| node.port() != source.port()).unwrap();

            // Half moved: the source has one key and redirects for the other.
            cluster.begin_move(slot, target);
            assert_eq!(cluster.move_keys(slot, target, |key| key == "{a}1"), 1);
            assert!(source.command(&["GET", "{a}1"]).error().unwrap().starts_with("ASK "));
            assert_eq!(source.command(&["GET", "{a}2"]).text(), "y");
            assert!(source.command(&["MGET", "{a}1", "{a}2"]).error().unwrap().starts_with("TRYAGAIN "));
            assert_eq!(cluster.move_keys(slot, target, |_| true), 1);
            cluster.end_move(slot, target);
            assert!(source.command(&["GET", "{a}1"]).error().unwrap().starts_with("MOVED "));
            assert_eq!(target.command(&["GET", "{a}2"]).text(), "y");
            cluster.wait_until_complete();
            assert_eq!(cluster.owner_of(slot).port(), target.port());

            // Back, among others.
            let slots: Vec<u16> =
                (slot..slot + 20).filter(|&slot| cluster.owner_of(slot).port() == target.port()).collect();
            cluster.move_slots(&slots, source);
            assert_eq!(source.command(&["GET", "{a}1"]).text(), "x");
        }
    }

    #[test]
    fn a_replica_is_promoted_on_command_and_after_its_master_was_killed() {
        let cluster = Cluster::with(&Config::new(Brand::Redis).set("cluster-node-timeout", "1000"));
        let (master, replica) = (&cluster.nodes()[0], &cluster.nodes()[3]);
        let slot = 0;
        assert_eq!(cluster.owner_of(slot).port(), master.port());
        cluster.fail_over_to(replica);
        cluster.wait_until_complete();
        assert_eq!(cluster.owner_of(slot).port(), replica.port());
        replica.kill9();
        cluster.wait_until_master(master);
        replica.restart();
        cluster.wait_until_complete();
        assert_eq!(cluster.owner_of(slot).port(), master.port());
    }
}
