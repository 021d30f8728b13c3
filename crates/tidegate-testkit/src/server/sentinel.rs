//! A real master with replicas and Sentinels for tests.
//!
//! ```no_run
//! use tidegate_testkit::server::{Brand, SentinelGroup};
//!
//! let group = SentinelGroup::start(Brand::Redis);
//! let old = group.master();
//! group.fail_over(); // as an operator does it, with `SENTINEL FAILOVER`
//! assert_ne!(group.master().port(), old.port());
//! group.detect_failures();
//! group.master().kill9(); // another server is elected
//! group.sentinels()[0].kill9(); // the others notice nothing
//! ```
//!
//! **Fast.** Sentinels query servers, and exchange what they know, every few seconds. Here they do so several times a
//! second, so that a group starts, and fails over, within a second or two. [`SentinelGroup::slow_down`] restores the
//! usual periods.
//!
//! **No failover by accident.** On a busy machine, a server or a Sentinel may stand still for seconds, for instance while
//! the disk is slow. So Sentinels report no server as down until [`SentinelGroup::detect_failures`] is called.
//!
//! **Shared.** Tests that leave the master as it is can use [`SentinelGroup::shared`], with keys of their own.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use super::{Brand, Config, Mode, Reply, Server};
use crate::poll::{eventually, poll};

/// The name of the master in the configuration of the Sentinels.
pub const MASTER_NAME: &str = "main";
/// The number of Sentinels.
const SENTINELS: usize = 3;
/// The period at which the Sentinels of a complete group inform each other, in milliseconds.
///
/// A Sentinel that does not lead a failover demotes the promoted replica if it has not learned of it for four periods.
/// The leader informs the others at once, but on a busy machine it may take seconds to write its configuration first.
const PUBLISH_PERIOD_MS: &str = "5000";

/// A running master, its replicas, and three Sentinels. Dropping it ends all of them; if its thread panics, the end of
/// each log is printed.
#[derive(Debug)]
pub struct SentinelGroup {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
}

/// A group that all tests of a binary share. If it is dropped while its thread panics, the logs are printed.
#[derive(Debug)]
pub struct SharedSentinelGroup(&'static SentinelGroup);

impl std::ops::Deref for SharedSentinelGroup {
    type Target = SentinelGroup;

    fn deref(&self) -> &SentinelGroup {
        self.0
    }
}

impl Drop for SharedSentinelGroup {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.servers.iter().chain(&self.0.sentinels).for_each(|server| eprintln!("{}", server.log_end()));
        }
    }
}

impl SentinelGroup {
    /// Starts a master with one replica, and waits until all Sentinels know both and each other.
    ///
    /// # Panics
    /// If a server does not start, or the group is not complete within about 30 seconds.
    pub fn start(brand: Brand) -> SentinelGroup {
        SentinelGroup::with(&Config::new(brand), 1, None)
    }

    /// Starts a group like [`SentinelGroup::start`], with the settings of `config` on the master and each of `replicas`
    /// replicas.
    ///
    /// The Sentinels require `sentinel_password` if it is given. A `requirepass` of `config` is the password of the
    /// servers; with [`Config::only_user`], the Sentinels use the user of the harness. With [`Config::tls`], the Sentinels
    /// also listen for TLS, and the servers and the Sentinels connect to each other with it.
    ///
    /// # Panics
    /// If a server does not start, or the group is not complete within about 30 seconds.
    pub fn with(config: &Config, replicas: usize, sentinel_password: Option<&str>) -> SentinelGroup {
        // After a transfer without a disk, a replica gets no writes for up to a second.
        let mut config = config.clone().set("repl-diskless-sync", "no");
        if let Some(password) = config.setting("requirepass").map(str::to_owned) {
            config = config.set("masterauth", &password);
        }
        if config.has_tls {
            config = config.set("tls-replication", "yes");
        }
        let master = config.clone().start();
        let replica = config.clone().set("replicaof", &format!("127.0.0.1 {}", announced_port(&master)));
        let replicas: Vec<_> = (0..replicas).map(|_| start(replica.clone())).collect();
        let mut settings = vec![
            ("sentinel monitor".to_owned(), format!("{MASTER_NAME} 127.0.0.1 {} 2", announced_port(&master))),
            ("sentinel down-after-milliseconds".to_owned(), format!("{MASTER_NAME} 600000")),
            ("sentinel failover-timeout".to_owned(), format!("{MASTER_NAME} 3000")),
        ];
        for (name, of_servers) in [("sentinel auth-user", "masteruser"), ("sentinel auth-pass", "masterauth")] {
            if let Some(value) = config.setting(of_servers) {
                settings.push((name.to_owned(), format!("{MASTER_NAME} {value}")));
            }
        }
        settings.extend(config.settings.iter().filter(|(name, _)| name.starts_with("tls-")).cloned());
        if let Some(password) = sentinel_password {
            settings.push(("requirepass".to_owned(), password.to_owned()));
            settings.push(("sentinel sentinel-pass".to_owned(), password.to_owned()));
        }
        let sentinel = Config { brand: replica.brand, mode: Mode::Sentinel, settings, ..replica.clone() };
        let sentinels: Vec<_> = (0..SENTINELS).map(|_| start(sentinel.clone())).collect();
        let join = |starting: Vec<thread::JoinHandle<Server>>| {
            starting.into_iter().map(|server| server.join().expect("a server that starts"))
        };
        let servers = std::iter::once(master).chain(join(replicas)).collect();
        let group = SentinelGroup { servers, sentinels: join(sentinels).collect() };
        group.sentinels.iter().for_each(speed_up);
        group.wait_until_complete();
        group
    }

    /// Returns the group of this brand that all tests of this binary share, and starts it if this is the first call.
    ///
    /// Its master must not be changed.
    ///
    /// # Panics
    /// See [`SentinelGroup::start`].
    pub fn shared(brand: Brand) -> SharedSentinelGroup {
        static GROUPS: [OnceLock<SentinelGroup>; 2] = [OnceLock::new(), OnceLock::new()];
        static STARTING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let index = Brand::ALL.iter().position(|&other| other == brand).expect("a known brand");
        SharedSentinelGroup(GROUPS[index].get_or_init(|| SentinelGroup::start(brand)))
    }

    /// Returns `redis+sentinel://` with the addresses of the first two Sentinels and the name of the master.
    pub fn url(&self) -> String {
        format!("redis+sentinel://{},{}/{MASTER_NAME}", self.sentinels[0].addr(), self.sentinels[1].addr())
    }

    /// Returns `rediss+sentinel://` with the TLS ports of the first two Sentinels and the name of the master.
    ///
    /// # Panics
    /// If the group was configured without [`Config::tls`].
    pub fn tls_url(&self) -> String {
        let [one, other] = [0, 1].map(|index| self.sentinels[index].tls_port());
        format!("rediss+sentinel://127.0.0.1:{one},127.0.0.1:{other}/{MASTER_NAME}")
    }

    /// Returns the servers with keys. The first one was the master at the start.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Returns the Sentinels.
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// Returns the master, in the view of the first running Sentinel. During a failover, that is the promoted replica.
    ///
    /// # Panics
    /// If no Sentinel runs.
    pub fn master(&self) -> &Server {
        let sentinel = self.running_sentinels()[0];
        self.server_at(master_port(sentinel))
    }

    /// Returns the servers other than the master.
    pub fn replicas(&self) -> Vec<&Server> {
        let master = self.master().port();
        self.servers.iter().filter(|server| server.port() != master).collect()
    }

    /// Restores the default periods at which Sentinels query servers and exchange what they know: 1 to 10 seconds.
    ///
    /// # Panics
    /// If a Sentinel does not accept it.
    pub fn slow_down(&self) {
        for sentinel in &self.sentinels {
            let periods =
                ["INFO-PERIOD", "10000", "PUBLISH-PERIOD", "2000", "PING-PERIOD", "1000", "ASK-PERIOD", "1000"];
            debug(sentinel, &periods);
        }
    }

    /// Makes the running Sentinels report a server or a Sentinel as down that has not answered for a second.
    ///
    /// # Panics
    /// If a Sentinel does not accept it.
    pub fn detect_failures(&self) {
        for sentinel in self.running_sentinels() {
            let reply = sentinel.command(&["SENTINEL", "SET", MASTER_NAME, "down-after-milliseconds", "1000"]);
            assert_eq!(reply, Reply::Simple("OK".into()));
        }
    }

    /// Makes the first running Sentinel promote a replica, as an operator does it, and waits until it names the new
    /// master.
    ///
    /// The other Sentinels and the old master learn of it later.
    ///
    /// # Panics
    /// If there is no other master within about 30 seconds.
    pub fn fail_over(&self) {
        let sentinel = self.running_sentinels()[0];
        let old = master_port(sentinel);
        let promoted = || {
            let port = master_port(sentinel);
            // A failover that takes too long on a busy machine is aborted.
            let flags = field(&sentinel.command(&["SENTINEL", "MASTER", MASTER_NAME]), "flags");
            if port == old && !flags.contains("failover_in_progress") {
                sentinel.command(&["SENTINEL", "FAILOVER", MASTER_NAME]);
            }
            port
        };
        eventually("a replica is promoted", promoted, |port| *port != old);
    }

    /// Restarts a Sentinel that was killed, with the configuration that it had written.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart_sentinel(&self, index: usize) {
        self.sentinels[index].restart();
        speed_up(&self.sentinels[index]);
    }

    /// Waits until the group is complete.
    ///
    /// All running Sentinels then name the same master, and know all running servers and each other. The master reports
    /// that it is one, and all running replicas are in sync with it.
    ///
    /// # Panics
    /// If that takes longer than about 30 seconds.
    pub fn wait_until_complete(&self) {
        let sentinels = self.running_sentinels();
        let ports = || sentinels.iter().map(|sentinel| master_port(sentinel)).collect::<Vec<_>>();
        eventually("all Sentinels name one master", ports, |ports| ports.iter().all(|port| *port == ports[0]));
        let is_up = |server: &&Server| server.connect().is_ok();
        let replicas: Vec<&Server> = self.replicas().into_iter().filter(is_up).collect();
        // The write and `WAIT` on one connection, which a Sentinel may close when it demotes a master.
        let acknowledged = || {
            let mut master = self.master().connect().ok()?;
            master.call(&["SET", "tidegate-testkit", "1", "PX", "1"]).ok()?;
            master.call(&["WAIT", &replicas.len().to_string(), "100"]).ok()
        };
        let expected = Some(Reply::Integer(i64::try_from(replicas.len()).expect("a few replicas")));
        eventually("replicas are in sync", acknowledged, |reply| *reply == expected);
        for sentinel in &sentinels {
            let known = || sentinel.command(&["SENTINEL", "REPLICAS", MASTER_NAME]);
            let is_known = |reply: &Reply| {
                replicas.iter().all(|replica| {
                    let port = announced_port(replica).to_string();
                    reply.items().iter().any(|known| {
                        let field = |name: &str| field(known, name);
                        field("port") == port && field("flags") == "slave" && field("master-link-status") == "ok"
                    })
                })
            };
            eventually("the Sentinel knows the replicas", known, is_known);
            let quorum = || sentinel.command(&["SENTINEL", "CKQUORUM", MASTER_NAME]);
            let expected = format!("OK {} usable Sentinels", sentinels.len());
            let is_usable = |reply: &Reply| reply.error().is_none() && reply.text().starts_with(&expected);
            eventually("the Sentinels know each other", quorum, is_usable);
            let state = || field(&sentinel.command(&["SENTINEL", "MASTER", MASTER_NAME]), "flags");
            eventually("no failover is in progress", state, |flags| flags == "master");
            debug(sentinel, &["PUBLISH-PERIOD", PUBLISH_PERIOD_MS]);
        }
    }

    /// Returns the Sentinels whose process runs.
    fn running_sentinels(&self) -> Vec<&Server> {
        self.sentinels.iter().filter(|sentinel| sentinel.connect().is_ok()).collect()
    }

    fn server_at(&self, port: u16) -> &Server {
        self.servers.iter().find(|server| announced_port(server) == port).expect("a server of this group")
    }
}

fn start(config: Config) -> thread::JoinHandle<Server> {
    thread::spawn(|| config.start())
}

/// Makes a Sentinel query servers, and inform the other Sentinels, every 500 ms. Also prevents TILT mode on a busy
/// machine.
fn speed_up(sentinel: &Server) {
    let periods = ["INFO-PERIOD", "500", "PUBLISH-PERIOD", "500", "PING-PERIOD", "200", "ASK-PERIOD", "100"];
    debug(sentinel, &periods);
    debug(sentinel, &["TILT-TRIGGER", "60000", "ELECTION-TIMEOUT", "2000"]);
}

fn debug(sentinel: &Server, settings: &[&str]) {
    let command: Vec<&str> = ["SENTINEL", "DEBUG"].into_iter().chain(settings.iter().copied()).collect();
    let accepted = poll(|| sentinel.command(&command) == Reply::Simple("OK".into()));
    assert!(accepted, "SENTINEL DEBUG: {:?}", sentinel.command(&command));
}

/// Returns the port that a server announces: that for TLS, if it has one.
fn announced_port(server: &Server) -> u16 {
    server.tls_port.unwrap_or(server.port)
}

fn master_port(sentinel: &Server) -> u16 {
    let address = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER_NAME]);
    u16::try_from(address.items()[1].integer()).expect("a port")
}

/// Returns the value of a field in a list of names and values.
fn field(reply: &Reply, name: &str) -> String {
    let pair = reply.items().chunks_exact(2).find(|pair| pair[0].text() == name);
    pair.map(|pair| pair[1].text()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_each_brand_fails_over_on_command_and_after_a_crash() {
        for brand in Brand::ALL {
            let group = SentinelGroup::start(brand);
            let (first, second) = (&group.servers()[0], &group.servers()[1]);
            assert_eq!(group.master().port(), first.port(), "{brand}");
            group.fail_over();
            assert_eq!(group.master().port(), second.port(), "{brand}");
            group.wait_until_complete();
            group.restart_sentinel(0);
            group.wait_until_complete();
            assert_eq!(group.master().port(), second.port(), "{brand}");
            group.detect_failures();
            second.kill9();
            eventually("another server is elected", || group.master().port(), |port| *port == first.port());
        }
    }

    #[test]
    fn passwords_of_servers_and_sentinels_differ() {
        let group = SentinelGroup::with(&Config::new(Brand::Redis).set("requirepass", "data"), 1, Some("watch"));
        let anonymous = super::super::Connection::open(group.sentinels()[0].addr()).unwrap().call(&["PING"]).unwrap();
        assert!(anonymous.error().is_some_and(|error| error.starts_with("NOAUTH")), "{anonymous:?}");
        group.fail_over();
        assert_eq!(group.master().port(), group.servers()[1].port());
    }
}
