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
    FiveMinutes "01-five-minutes.md"
    ChoosingAnAlgorithm "02-choosing-an-algorithm.md"
    RulesAndPlans "03-rules-and-plans.md"
    BehindAProxy "04-behind-a-proxy.md"
    SeveralInstances "05-several-instances.md"
    HeadersAndRefusals "06-headers-and-refusals.md"
    FromOtherLanguages "07-from-other-languages.md"
    TestingYourLimits "08-testing-your-limits.md"
    WithProxies "09-with-nginx-caddy-traefik.md"
    ComingFromOtherLimiters "10-coming-from-other-limiters.md"
    InFrontOfYourService "11-in-front-of-your-service.md"
}
