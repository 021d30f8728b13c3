//! The README and the guide, whose Rust blocks are doctests of this crate. Compiled for doctests alone, because the pages
//! are outside of the published package.

macro_rules! pages {
    ($($name:ident $file:literal)*) => {
        $(#[doc = include_str!(concat!("../../../docs/guide/", $file))] struct $name;)*
    };
}

#[doc = include_str!("../../../README.md")]
struct Readme;

pages! {
    InFrontOfYourService "01-in-front-of-your-service.md"
    FiveMinutes "02-five-minutes.md"
    RulesAndPlans "03-rules-and-plans.md"
    BehindAProxy "04-behind-a-proxy.md"
    HeadersAndRefusals "05-headers-and-refusals.md"
    SeveralInstances "06-several-instances.md"
    FromOtherLanguages "07-from-other-languages.md"
    WithProxies "08-with-nginx-caddy-traefik.md"
    ChoosingAnAlgorithm "09-choosing-an-algorithm.md"
    TestingYourLimits "10-testing-your-limits.md"
    ComingFromOtherLimiters "11-coming-from-other-limiters.md"
}
