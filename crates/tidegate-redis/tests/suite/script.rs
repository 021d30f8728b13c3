//! The script, called directly as a client in another language does.

use tidegate_redis::SCRIPT;
use tidegate_testkit::server::{Brand, Config, Reply, Server};

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
                Reply::Error(text) => assert!(text.starts_with("TIDEGATE_ARGUMENT"), "{arguments:?}: {text}"),
                reply => panic!("{brand} {arguments:?}: {reply:?}"),
            }
            assert_eq!(server.command(&["DBSIZE"]).integer(), 0, "{arguments:?}");
        }
        // In two steps it is two checks, and a ban key may stand in each.
        let reply = run(&server, &["ban", "a", "b", "ban", "a", "b"], &["check 2 1", log, log, "check 2 1", log, log]);
        assert_eq!(reply.items().len(), 1 + 2 * (1 + 2 * 6));
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
            Reply::Error(text) => assert!(text.contains("TIDEGATE_ARGUMENT a call holds checks or refunds"), "{text}"),
            reply => panic!("{arguments:?}: {reply:?}"),
        }
        assert_eq!(server.command(&["DBSIZE"]).integer(), 0, "{arguments:?}");
    }
    let refunds = ["refund 1", line, receipt, "refund 1", line, receipt];
    assert_eq!(run(&server, &["a", "a"], &refunds).items().len(), 3);
}

#[test]
fn malformed_redemption_is_rejected_and_nothing_is_written() {
    let (line, charged, receipt) =
        ("sliding 3 60000000 1", "sliding 3 60000000 1 count_denied=1", "1760000000000000 60000000");
    let (until, later) = ("refund 1 1760000060000000 5", "refund 2 1760000060000000 5");
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        for (keys, arguments) in [
            // No key, or only that of the receipt.
            (&[][..], &["refund 0 1760000060000000 5"][..]),
            (&["r"], &[until, line, receipt]),
            (&["r", "a"], &[later, line, receipt, line, receipt]),
            // The receipt key is also that of a counter.
            (&["r", "r"], &[until, line, receipt]),
            (&["r", "a", "a"], &[later, line, receipt, charged, "charge"]),
            // The lines of a limit.
            (&["r", "a"], &[until, line]),
            (&["r", "a"], &[until, line, "charge"]),
            (&["r", "a"], &[until, charged, "charges"]),
            (&["r", "a"], &[until, charged, ""]),
            (&["r", "a"], &[until, line, "1760000000000000"]),
            (&["r", "a"], &[until, line, "1760000000000000 99999999999999999999"]),
            (&["r", "a"], &[until, "hello", receipt]),
            // Only a redemption charges.
            (&["a"], &["refund 1", charged, "charge"]),
            // The head.
            (&["r"], &["refund 0"]),
            (&["r"], &["refund 0 "]),
            (&["r"], &["refund 0 99999999999999999999 5"]),
            (&["r"], &["refund 0 -1 5"]),
            (&["r"], &["refund 0 1760000060000000"]),
            (&["r"], &["refund 0 1760000060000000 1024"]),
            (&["r"], &["refund 0 1760000060000000 -1"]),
            (&["r"], &["refund 0 1760000060000000 5 1"]),
            (&["a"], &["refund 1  5", line, receipt]),
            (&["r"], &["redeem 0 1760000060000000 5"]),
            // A check in the same call, also if the receipt is expired.
            (&["r", "a"], &["refund 0 1760000060000000 5", line]),
            (&["r", "a"], &["refund 0 5 5", line]),
            (&["r", "a"], &["refund 0 1760000060000000 5", "check 1", line]),
        ] {
            match run(&server, keys, arguments) {
                Reply::Error(text) => assert!(text.starts_with("TIDEGATE_ARGUMENT"), "{arguments:?}: {text}"),
                reply => panic!("{brand} {arguments:?}: {reply:?}"),
            }
            assert_eq!(server.command(&["DBSIZE"]).integer(), 0, "{arguments:?}");
        }
        let reply = run(
            &server,
            &["r", "a", "b", "r", "r", "s"],
            &[
                later,
                line,
                receipt,
                charged,
                "charge",
                "refund 0 1760000060000000 5",
                "refund 0 1760000060000000 6",
                "refund 0 5 5",
            ],
        );
        let numbers: Vec<i64> = reply.items().iter().skip(1).map(Reply::integer).collect();
        assert_eq!(numbers, [1, 0, 1, -1], "{brand}: done, used before, another of the block, expired");
        assert_eq!(server.command(&["DBSIZE"]).integer(), 2, "the block and the counter that was charged");
    }
}

/// What an earlier redemption of the call has written stays, and the error says so.
#[test]
fn error_after_a_redemption_says_that_something_was_written() {
    let server = Server::redis();
    let charged = "fixed-window 3 60000000 1 count_denied=1";
    let reply = run(&server, &["r", "a", "s"], &["refund 1 1760000060000000 5", charged, "charge", "refund 0 x"]);
    assert!(matches!(&reply, Reply::Error(text) if text.starts_with("TIDEGATE_PARTLY TIDEGATE_ARGUMENT")), "{reply:?}");
    assert_eq!(server.command(&["GET", "a"]).text(), "1759999980000000 60000000 1 0");
    let reply = run(&server, &["r", "a"], &["refund 1 1760000060000000 5", charged, "charge"]);
    assert_eq!(reply.items()[1].integer(), 0);
    assert_eq!(server.command(&["GET", "a"]).text(), "1759999980000000 60000000 1 0", "charged once");
}

/// A bug in the script must not look like foreign data under a key, which is no fault of the server.
#[test]
fn internal_error_of_the_script_is_not_foreign_data() {
    const FITS: &str = "local function fits(state, limit, cost) return";
    const PUSH: &str = "call('RPUSH', key, now_text)";
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        for (place, bug, start) in [
            (FITS, "local function fits(state, limit, cost) return nil +", "TIDEGATE_INTERNAL user_script:"),
            // Arithmetic on a text.
            (
                FITS,
                "local function fits(state, limit, cost) local a_text = 'x' return a_text +",
                "TIDEGATE_INTERNAL user_script:",
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
