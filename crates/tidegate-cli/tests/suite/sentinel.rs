//! A master that Sentinels name as the store of the service and of commands.

use tidegate_testkit::server::{Brand, Config, SentinelGroup, Server};

use tidegate_testkit::program::{Serving, command, ended};

#[test]
fn serve_and_every_command_follow_the_master_and_name_it() {
    let config = Config::new(Brand::Redis).set("requirepass", "data-pass");
    let group = SentinelGroup::with(&config, 1, Some("watch-pass"));
    let url = group.url().replace("://", "://:data-pass@");
    let with_password = |mut command: std::process::Command| {
        command.env("TIDEGATE_SENTINEL_PASSWORD", "watch-pass").env("TIDEGATE_STORE", &url);
        command
    };
    let serving = Serving::start_as(with_password(Serving::command()), &[]);
    serving.until("/readyz", |answer| answer.status == 200);
    let explicit = r#"{"key":"user:42","limit":"10/h"}"#;
    let answer = serving.check(explicit);
    assert!(answer.body.contains(r#""source":"store""#) && answer.body.contains(r#""remaining":9"#), "{answer:?}");
    let run = |arguments: &[&str]| {
        let output = with_password(command()).args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, output) = run(&["inspect", "user:42", "10/h", "--json"]);
    assert!(code == Some(0) && output.contains(r#""remaining":9"#), "{output}");
    assert_eq!(run(&["ban", "user:7", "--for", "1h"]).0, Some(0));
    assert_eq!(serving.check(r#"{"key":"user:7","limit":"10/h"}"#).status, 403);

    // `/readyz` and the metrics name the present master.
    let names = |server: &Server| {
        serving.until("/readyz", |answer| answer.body.contains(&format!(r#""address":"{}""#, server.url())));
        let line = format!("tidegate_store_node_reachable{{node=\"{}\"}} 1", server.url());
        let metrics = serving.until("/metrics", |answer| answer.body.contains(&line));
        assert_eq!(metrics.body.matches("tidegate_store_node_reachable{").count(), 1, "{}", metrics.body);
    };
    names(&group.servers()[0]);
    group.fail_over();
    names(&group.servers()[1]);
    serving.until("/readyz", |answer| answer.status == 200);
    let (code, output) = run(&["check", "user:42", "10/h", "--json"]);
    assert!(code == Some(0) && output.contains(r#""remaining":8"#), "{output}");
    assert_eq!(run(&["unban", "user:7"]).0, Some(0));
}

#[test]
fn store_that_can_never_be_used_is_refused_at_the_start() {
    let group = SentinelGroup::shared(Brand::Redis);
    let sentinel = group.sentinels()[0].addr();
    let server = group.servers()[0].addr();
    for (url, reason) in [
        (format!("redis+sentinel://{sentinel}/other"), "it does not watch a master named other; it watches main"),
        (format!("redis+sentinel://{server}/main"), "the server is not a Sentinel"),
        (format!("redis://{sentinel}"), "the server is a Sentinel, which holds no keys"),
    ] {
        let listeners = ["serve", "--http", "127.0.0.1:0", "--resp", "off", "--admin", "off"];
        for output in [
            ended(command().args(listeners).args(["--store", &url])),
            command().args(["check", "user:42", "10/min", "--store", &url]).output().unwrap(),
        ] {
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains(reason) && error.contains(&url), "{error}");
        }
    }
}
