// Package testdb gives a test a database of its own: a schema in a shared
// PostgreSQL server, a database behind PgBouncer, or an SQLite file. Only test
// files import it.
//
// The server is the one that OUTBOX_TEST_POSTGRES names (the DSN of a superuser,
// as a URL), or one that is started once for the test binary and stopped by
// Main, which every package's TestMain calls:
//
//	func TestMain(m *testing.M) { testdb.Main(m) }
//
// Where PostgreSQL or PgBouncer is not installed, tests that need it are
// skipped, but fail if CI=true.
package testdb
