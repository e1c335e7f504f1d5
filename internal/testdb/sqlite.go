package testdb

import (
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"
)

// SQLiteDB is a database file of its own for one test.
type SQLiteDB struct {
	// Path is the file, in the test's temporary directory.
	Path string
	// DSN opens it with glebarez/sqlite in WAL mode, with a busy timeout of
	// five seconds and synchronous=NORMAL.
	DSN string
}

// SQLite names a database file that the first handle creates.
func SQLite(t testing.TB) *SQLiteDB {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.db")
	return &SQLiteDB{
		Path: path,
		DSN:  path + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_pragma=synchronous(NORMAL)",
	}
}

// Gorm opens a pool of its own, closed when the test ends, and a handle on it.
func (s *SQLiteDB) Gorm(t testing.TB, opts ...Option) *gorm.DB {
	t.Helper()
	o := newOptions(opts)
	db, err := gorm.Open(&sqlite.Dialector{Conn: s.open(t, o)}, o.gormConfig())
	if err != nil {
		t.Fatalf("open gorm: %v", err)
	}
	return db
}

// SQL opens a pool of its own, closed when the test ends.
func (s *SQLiteDB) SQL(t testing.TB, opts ...Option) *sql.DB {
	t.Helper()
	return s.open(t, newOptions(opts))
}

func (s *SQLiteDB) open(t testing.TB, o options) *sql.DB {
	t.Helper()
	db, err := sql.Open(sqlite.DriverName, s.DSN)
	if err != nil {
		t.Fatalf("open %s: %v", s.Path, err)
	}
	db.SetMaxOpenConns(o.poolSize)
	db.SetMaxIdleConns(o.poolSize)
	closeAtEnd(t, db)
	return db
}
