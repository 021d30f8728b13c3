//! The script, called directly as a client in another language does.

use tollgate_redis::SCRIPT;
use tollgate_testkit::server::{Brand, Config, Reply, Server};

/// Runs the script at a fixed time.
fn run(server: &Server, keys: &[&str], arguments: &[&str]) -> Reply {
    run_source(server, SCRIPT, keys, arguments)
}

fn run_source(server: &Server, source: &str, keys: &[&str], arguments: &[&str]) -> Reply {
    let count = keys.len().to_string();
    let mut command = vec!["EVAL", source, &count];
    command.extend(keys);
    command.push("1760000000000000");
    command.extend(arguments);
    server.command(&command)
}

#[test]
fn key_that_occurs_twice_in_one_step_is_rejected_and_nothing_is_charged() {
    let (log, longer, bucket) = ("sliding 3 60000000 1", "sliding 3 120000000 1", "token-bucket 3 60000000 1");
    let receipt = "1760000000000000 60000000";
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        for (keys, arguments) in [
            (&["a", "a"][..], &["check 2", log, log][..]),
            (&["a", "b", "a"], &["check 3", log, log, longer]),
            (&["a", "a"], &["check 2 0 9", bucket, bucket]),
            (&["a", "a"], &["refund 2", log, receipt, log, receipt]),
            (&["a", "a"], &["refund 2", bucket, receipt, bucket, receipt]),
        ] {
            match run(&server, keys, arguments) {
                Reply::Error(text) => assert!(text.starts_with("TOLLGATE_ARGUMENT"), "{arguments:?}: {text}"),
                reply => panic!("{brand} {arguments:?}: {reply:?}"),
            }
            assert_eq!(server.command(&["DBSIZE"]).integer(), 0, "{arguments:?}");
        }
        // In two steps it is two checks, and a ban key may stand in each.
        let reply = run(&server, &["ban", "a", "b", "ban", "a", "b"], &["check 2 1", log, log, "check 2 1", log, log]);
        assert_eq!(reply.items().len(), 1 + 2 * (1 + 2 * 5));
    }
}

#[test]
fn call_with_checks_and_refunds_is_rejected() {
    let server = Server::redis();
    let (line, receipt) = ("sliding 3 60000000 1", "1760000000000000 60000000");
    for arguments in [
        &[line, "refund 1", line, receipt][..],
        &["check 1", line, "refund 1", line, receipt],
        &["refund 1", line, receipt, line],
        &["refund 1", line, receipt, "check 1", line],
    ] {
        match run(&server, &["a", "b"], arguments) {
            Reply::Error(text) => assert!(text.contains("TOLLGATE_ARGUMENT a call holds checks or refunds"), "{text}"),
            reply => panic!("{arguments:?}: {reply:?}"),
        }
        assert_eq!(server.command(&["DBSIZE"]).integer(), 0, "{arguments:?}");
    }
    let refunds = ["refund 1", line, receipt, "refund 1", line, receipt];
    assert_eq!(run(&server, &["a", "a"], &refunds).items().len(), 3);
}

/// A bug in the script must not look like foreign data under a key, which is no fault of the server.
#[test]
fn internal_error_of_the_script_is_not_foreign_data() {
    const FITS: &str = "local function fits(state, limit, cost) return";
    const PUSH: &str = "call('RPUSH', key, now_text)";
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        for (place, bug, start) in [
            (FITS, "local function fits(state, limit, cost) return nil +", "TOLLGATE_INTERNAL user_script:"),
            // Arithmetic on a text.
            (
                FITS,
                "local function fits(state, limit, cost) local a_text = 'x' return a_text +",
                "TOLLGATE_INTERNAL user_script:",
            ),
            // While writing, the server reports the error.
            (PUSH, "call('RPUSH', key, nil .. now_text)", "ERR user_script:"),
        ] {
            assert_eq!(SCRIPT.matches(place).count(), 1, "{place}");
            let broken = SCRIPT.replace(place, bug);
            match run_source(&server, &broken, &["a"], &["sliding 3 60000000 1"]) {
                Reply::Error(text) => assert!(text.starts_with(start), "{brand}: {text}"),
                reply => panic!("{brand}: {reply:?}"),
            }
            assert_eq!(server.command(&["DBSIZE"]).integer(), 0, "nothing was written");
        }
    }
}
