use super::*;

fn info(server: &Server, field: &str) -> String {
    let info = server.command(&["INFO"]).text();
    let prefix = format!("{field}:");
    info.lines()
        .find_map(|line| line.strip_prefix(&prefix))
        .unwrap_or_else(|| panic!("no {field} in {info}"))
        .to_owned()
}

fn runs(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn each_brand_starts_and_identifies_itself() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        assert_eq!(server.command(&["PING"]).text(), "PONG");
        assert_eq!(info(&server, "process_id"), server.pid().to_string());
        assert_eq!(server.url(), format!("redis://127.0.0.1:{}", server.port()));
        assert_eq!(info(&server, "tcp_port"), server.port().to_string());
        assert_eq!(server.brand(), brand);
        // Only Valkey has this field.
        let is_valkey = server.command(&["INFO", "server"]).text().contains("valkey_version");
        assert_eq!(is_valkey, brand == Brand::Valkey);
    }
}

#[test]
fn settings_reach_the_server() {
    let alice = "alice on >wonderland ~a:* +get";
    let server = Config::new(Brand::Redis).set("maxmemory", "4mb").set("databases", "2").set("user", alice).start();
    assert_eq!(server.command(&["CONFIG", "GET", "maxmemory"]).items()[1].text(), "4194304");
    assert!(server.command(&["SELECT", "2"]).error().is_some());
    let mut connection = server.connect().unwrap();
    assert_eq!(connection.call(&["AUTH", "alice", "wonderland"]).unwrap().text(), "OK");
    assert!(connection.call(&["SET", "a:1", "x"]).unwrap().error().unwrap().starts_with("NOPERM"));
}

#[test]
fn a_password_is_sent_by_our_own_commands_and_required_of_others() {
    let server = Config::new(Brand::Redis).set("requirepass", "sesame").start();
    assert_eq!(server.command(&["PING"]).text(), "PONG");
    let refused = Connection::open(server.addr()).unwrap().call(&["PING"]).unwrap();
    assert!(refused.error().unwrap().starts_with("NOAUTH"));
}

#[test]
fn environment_reaches_the_server() {
    // The dynamic linker reads this variable and writes to the server's log.
    let server = Config::new(Brand::Redis).env("LD_DEBUG", "libs").start();
    assert!(server.log().contains("calling init: "), "{}", server.log());
}

#[test]
fn an_invalid_setting_fails_with_the_servers_message() {
    let start = || Config::new(Brand::Redis).set("maxmemory", "plenty").start();
    let panic = std::panic::catch_unwind(start).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("exited during its start") && message.contains("maxmemory plenty"), "{message}");
}

#[test]
fn kill9_ends_the_process_and_restart_loses_data_without_persistence() {
    let server = Server::redis();
    let (pid, port) = (server.pid(), server.port());
    server.command(&["SET", "key", "kept"]);
    server.kill9();
    assert!(!runs(pid));
    assert_eq!(server.connect().unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    server.kill9();
    server.restart();
    assert_ne!(server.pid(), pid);
    assert_eq!(server.port(), port);
    assert_eq!(server.command(&["GET", "key"]), Reply::Nil);
}

#[test]
fn a_persistent_server_keeps_its_data_across_kill9() {
    for brand in Brand::ALL {
        let server = Config::new(brand).persistent().start();
        server.command(&["SET", "key", "kept"]);
        server.restart();
        assert_eq!(server.command(&["GET", "key"]).text(), "kept", "{brand}");
        let starts = server.log().matches("Server initialized").count();
        assert_eq!(starts, 2, "the log is continued after a restart: {}", server.log());
    }
}

/// Starts a server with 500 saved keys that pauses after loading each key.
fn slow_to_load(pause_us: u32) -> Server {
    let slow = Config::new(Brand::Redis).set("key-load-delay", &pause_us.to_string());
    // How often the server handles its clients while loading.
    let server = slow.set("loading-process-events-interval-bytes", "1024").start();
    let mut connection = server.connect().unwrap();
    for key in 0..500 {
        connection.call(&["SET", &key.to_string(), &format!("{key:0>100}")]).unwrap();
    }
    assert_eq!(connection.call(&["SAVE"]).unwrap().text(), "OK");
    server
}

#[test]
fn a_server_answers_loading_while_it_loads() {
    let server = slow_to_load(20_000);
    server.restart_without_waiting();
    let loading = server.command(&["GET", "1"]);
    assert!(loading.error().is_some_and(|error| error.starts_with("LOADING")), "{loading:?}");
}

#[test]
fn restart_waits_until_everything_is_loaded() {
    let server = slow_to_load(500);
    server.restart();
    assert_eq!(server.command(&["DBSIZE"]).integer(), 500);
}

#[test]
fn a_stopped_server_accepts_and_answers_only_after_cont() {
    let server = Server::redis();
    server.stop();
    let stat = fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap();
    assert_eq!(stat.rsplit(") ").next().unwrap().split(' ').next(), Some("T"), "{stat}");
    let mut connection = Connection::open(server.addr()).unwrap();
    connection.send(&["PING"]).unwrap();
    server.cont();
    assert_eq!(connection.receive().unwrap().text(), "PONG");
}

#[test]
fn a_stopped_server_can_be_killed_restarted_and_dropped() {
    let server = Server::redis();
    let first = server.pid();
    server.stop();
    server.restart();
    let second = server.pid();
    assert_eq!(server.command(&["PING"]).text(), "PONG");
    server.stop();
    drop(server);
    assert!(!runs(first) && !runs(second));
}

#[test]
fn dropping_removes_the_directory() {
    let server = Server::redis();
    let dir = server.dir.path().to_owned();
    assert!(dir.join("server.log").exists());
    drop(server);
    assert!(!dir.exists());
}

#[test]
fn the_leash_kills_even_a_stopped_server_when_the_test_process_dies() {
    let server = Server::redis();
    let dir = server.dir.path().to_owned();
    server.stop();
    // Closes our end of the pipe, as the kernel does when the test process dies.
    drop(server.process().as_mut().unwrap().leash.stdin.take());
    let mut process = server.process();
    assert!(poll(|| process.as_mut().unwrap().child.try_wait().unwrap().is_some()));
    assert!(poll(|| !dir.exists()));
}

#[test]
fn restart_waits_for_a_port_that_was_taken_while_the_server_was_down() {
    let server = Server::redis();
    server.kill9();
    let intruder = std::net::TcpListener::bind(server.addr()).unwrap();
    assert!(!server.launch());
    drop(intruder);
    server.restart();
    assert_eq!(server.command(&["PING"]).text(), "PONG");
}

#[test]
fn a_failing_test_shows_the_end_of_the_log() {
    let server = Server::redis();
    assert!(server.log_end().contains("Ready to accept connections"), "{}", server.log_end());
    assert!(server.log_end().contains(&server.port().to_string()));
}
