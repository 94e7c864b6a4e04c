//! The whole of a request, from parse to answer: every row of table "Gate", several gates on one store, gates that die,
//! facilitators that lie.

mod hooked;
mod lies;
mod replicas;
mod scene;
mod table;
