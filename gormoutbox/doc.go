// Package gormoutbox gives GORM what an outbox needs of it: it tells whether a
// handle is in a transaction, runs SQL in that transaction, and runs functions
// after the commit that really happened. It knows nothing of messages.
//
// # How it works
//
// GORM has no hook after the commit, and a [gorm.DB] has no state of the
// transaction it is in: the one thing that all handles of a transaction share
// is its connection. [Install] therefore puts a wrapper around the connection
// pool. Whoever begins a transaction, [gorm.DB.Transaction], [gorm.DB.Begin] or
// GORM itself around a Create, gets it from the wrapper and with it the list of
// functions to run after its commit. The list ends with the transaction.
//
//	gorm.DB → gorm.PreparedStmtDB, if statements are cached → pool        → *sql.DB
//	  tx    → gorm.PreparedStmtTX, if statements are cached → transaction → *sql.Tx
//
// The wrapper is under the statement cache, where GORM and its plugins do not
// see it: they look for the cache by its type. Everything else GORM does goes
// on unchanged, except that on SQLite a commit which fails ends the transaction,
// as on other databases.
//
// # Limits
//
// A transaction that was begun where Install did not see it is refused with
// [ErrNotInstalled]: on the handle of [gorm.DB.Connection], which has a
// connection past the pool, unless that was given to Install as well; and on a
// pool that was put around the wrapper. Install last.
//
// Savepoints are followed by the SQL that sets, releases and rolls back to
// them, as long as each such statement is run through the handle, by itself
// and with no comment before it. GORM's own are.
//
// A transaction that is ended by SQL text (COMMIT, ROLLBACK) instead of GORM's
// Commit and Rollback runs no functions.
package gormoutbox
