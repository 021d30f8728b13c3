//! Property tests: a structured-field parser reads the same numbers back from the rendered headers.

use proptest::prelude::*;
use sfv::{BareItem, Item, List, ListEntry, Parser};
use tidegate_core::{QUOTA_MAX, WINDOW_US_MAX};

use super::*;

/// A parsed item: the bare item and its parameters in order.
type Read = (BareItem, Vec<(String, i64)>);

fn read_item(item: &Item) -> Read {
    let integer = |value: &BareItem| match value {
        BareItem::Integer(integer) => i64::from(*integer),
        other => panic!("no integer: {other:?}"),
    };
    (item.bare_item.clone(), item.params.iter().map(|(key, value)| (key.to_string(), integer(value))).collect())
}

fn read_list(headers: &HeaderMap, name: &str) -> Vec<Read> {
    let Some(value) = headers.get(name) else { return Vec::new() };
    let list: List = Parser::new(value.as_bytes()).parse().unwrap_or_else(|error| panic!("{value:?}: {error}"));
    let items = list.iter().map(|entry| match entry {
        ListEntry::Item(item) => read_item(item),
        ListEntry::InnerList(list) => panic!("no item: {list:?}"),
    });
    items.collect()
}

fn read_integer(headers: &HeaderMap, name: &str) -> Option<i64> {
    let item: Item = Parser::new(headers.get(name)?.as_bytes()).parse().unwrap();
    let (BareItem::Integer(integer), parameters) = read_item(&item) else { panic!("no integer: {item:?}") };
    assert!(parameters.is_empty());
    Some(integer.into())
}

fn string(text: &str) -> BareItem {
    BareItem::String(text.to_owned().try_into().unwrap())
}

fn with(key: &str, value: Option<u64>) -> Option<(String, i64)> {
    value.map(|value| (key.to_owned(), i64::try_from(value).unwrap()))
}

fn any_wait() -> impl Strategy<Value = Wait> {
    let finite = prop_oneof![0..3_000_000u64, 0..1u64 << 52].prop_map(Wait::from_micros);
    prop_oneof![9 => finite, 1 => Just(Wait::NEVER)]
}

fn any_limit() -> impl Strategy<Value = (Policy, LimitStatus)> {
    let whole_secs = (1..=WINDOW_US_MAX / 1_000_000).prop_map(|secs| secs * 1_000_000);
    let window_us = prop_oneof![whole_secs, 1_000..=WINDOW_US_MAX];
    let finite = (0..1u64 << 52).prop_map(Wait::from_micros);
    let limits = ("[a-z0-9-]{1,12}", 1..=QUOTA_MAX, window_us, any::<bool>(), 0..=QUOTA_MAX, any_wait(), finite);
    limits.prop_map(|(name, quota, window_us, allowed, remaining, retry_after, next_after)| {
        let limit = Limit::new(quota.into(), std::time::Duration::from_micros(window_us)).unwrap();
        let remaining = remaining.min(quota);
        let status = LimitStatus {
            allowed,
            cost: 1,
            quota,
            remaining,
            retry_after,
            next_after,
            reset_after: next_after,
            late_us: 0,
            refunded_before: 0,
        };
        (Policy::new(&name, limit).unwrap(), status)
    })
}

/// Returns the expected `t` in seconds, rounded up; implemented from the contract, independently of the renderer.
fn expected_wait(status: &LimitStatus) -> Option<u64> {
    let wait = if status.allowed { status.next_after } else { status.retry_after };
    wait.as_duration().map(|wait| wait.as_secs() + u64::from(wait.subsec_micros() > 0))
}

fn expected_window(policy: &Policy) -> Option<u64> {
    let window = policy.limit().window();
    (window.subsec_nanos() == 0).then_some(window.as_secs())
}

proptest! {
    #[test]
    fn ietf_fields_parse_back_to_every_policys_own_numbers(limits in prop::collection::vec(any_limit(), 1..8)) {
        let styles = styles(&["ietf"]);
        let policies = Policies::new(limits.iter().map(|(policy, _)| policy.clone().with_styles(styles)));
        let statuses: Vec<LimitStatus> = limits.iter().map(|(_, status)| *status).collect();
        let headers = headers(&policies, &decision(&statuses));

        let advertised = policies.policies().map(|policy| {
            let quota = Some(policy.limit().quota().into());
            let parameters = [with("q", quota), with("w", expected_window(policy))];
            (string(policy.name()), parameters.into_iter().flatten().collect())
        });
        prop_assert_eq!(read_list(&headers, "ratelimit-policy"), advertised.collect::<Vec<Read>>());

        let left = policies.policies().zip(&statuses).map(|(policy, status)| {
            let parameters = [with("r", Some(status.remaining.into())), with("t", expected_wait(status))];
            (string(policy.name()), parameters.into_iter().flatten().collect())
        });
        prop_assert_eq!(read_list(&headers, "ratelimit"), left.collect::<Vec<Read>>());
    }

    #[test]
    fn draft_6_fields_parse_back_to_one_limit_and_all_policies(limits in prop::collection::vec(any_limit(), 1..8)) {
        let styles = styles(&["draft-6"]);
        let policies = Policies::new(limits.iter().map(|(policy, _)| policy.clone().with_styles(styles)));
        let statuses: Vec<LimitStatus> = limits.iter().map(|(_, status)| *status).collect();
        let headers = headers(&policies, &decision(&statuses));

        let whole = limits.iter().filter_map(|(policy, _)| {
            let window = expected_window(policy)?;
            let quota = BareItem::Integer(policy.limit().quota().into());
            Some((quota, with("w", Some(window)).into_iter().collect()))
        });
        prop_assert_eq!(read_list(&headers, "ratelimit-policy"), whole.collect::<Vec<Read>>());

        let limit = read_integer(&headers, "ratelimit-limit").unwrap();
        let remaining = read_integer(&headers, "ratelimit-remaining").unwrap();
        let reset = read_integer(&headers, "ratelimit-reset").unwrap();
        let is_shown = statuses.iter().any(|status| {
            let wait = expected_wait(status).or(status.next_after.as_secs_ceil()).unwrap();
            (i64::from(status.quota), i64::from(status.remaining), i64::try_from(wait).unwrap()) == (limit, remaining, reset)
        });
        prop_assert!(is_shown, "{limit} {remaining} {reset} is none of {statuses:?}");
    }

    #[test]
    fn a_client_that_obeys_the_headers_is_never_early_and_retry_after_is_never_zero(
        limits in prop::collection::vec(any_limit(), 1..8), at_us in 0..1u64 << 52,
    ) {
        let policies = Policies::new(limits.iter().map(|(policy, _)| policy.clone()));
        let statuses: Vec<LimitStatus> = limits.iter().map(|(_, status)| *status).collect();
        let decision = Decision { at: Timestamp::from_micros(at_us), ..decision(&statuses) };
        let headers = headers(&policies, &decision);

        let refusing = || statuses.iter().filter(|status| !status.allowed);
        let longest_us = refusing().map(|status| status.retry_after.as_micros().unwrap_or(u64::MAX)).max();
        let retry_after = read_integer(&headers, "retry-after").map(|secs| secs as u64);
        match longest_us {
            None | Some(u64::MAX) => prop_assert_eq!(retry_after, None),
            Some(us) => {
                prop_assert_eq!(retry_after, Some(us.div_ceil(1_000_000).max(1)));
                let reset = read_integer(&headers, "x-ratelimit-reset").unwrap() as u64;
                prop_assert!(reset * 1_000_000 >= at_us + us && reset * 1_000_000 < at_us + us + 1_000_000);
            }
        }
        prop_assert_eq!(longest_us.is_some(), headers.contains_key("cache-control"));
    }
}
