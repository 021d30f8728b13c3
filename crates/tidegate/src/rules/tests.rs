mod corpus;
mod disguise;
mod limit_set;
mod matching;
