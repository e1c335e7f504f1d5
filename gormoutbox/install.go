package gormoutbox

import (
	"database/sql"
	"errors"
	"fmt"

	"gorm.io/gorm"
)

// Install wraps the connection pool of db. It is meant for the Initialize of a
// [gorm.Plugin], where db is the handle that [gorm.Open] returned, and like
// [gorm.DB.Use] it must not run while others use db. Transactions that are
// open stay as they are.
//
// It starts nothing, writes nothing to the database, and may be called several
// times: a pool is wrapped once. The pools that dbresolver opens are wrapped
// as well, whichever of the two is installed first.
//
// The handle that [gorm.DB.Connection] passes is on a connection of its own,
// taken past the pool. To begin transactions there, call Install on it, too;
// others may use db meanwhile.
func Install(db *gorm.DB) error {
	if db == nil || db.Config == nil || db.Dialector == nil || db.Statement == nil {
		return errors.New("gormoutbox: install: the handle is nil or was not opened")
	}
	if db.Config.ConnPool == nil || db.Statement.ConnPool == nil {
		return errors.New("gormoutbox: install: the handle has no connection pool")
	}
	if _, ok := db.Statement.ConnPool.(gorm.TxCommitter); ok {
		return errors.New("gormoutbox: install: the handle is in a transaction; use the one that gorm.Open returned")
	}
	if wrapped, changed := wrap(db, db.Config.ConnPool); changed {
		db.Config.ConnPool = wrapped
	}
	if wrapped, changed := wrap(db, db.Statement.ConnPool); changed {
		db.Statement.ConnPool = wrapped
	}
	// The callbacks belong to the database, as do the plugins. Being one makes
	// dbresolver call Initialize for each pool that it opens from now on.
	if _, ok := db.Plugins[plugin{}.Name()]; ok {
		return nil
	}
	if err := wrapResolved(db); err != nil {
		return fmt.Errorf("gormoutbox: install: wrap the pools of dbresolver: %w", err)
	}
	db.Plugins[plugin{}.Name()] = plugin{}
	return nil
}

// plugin marks a database as installed.
type plugin struct{}

func (plugin) Name() string { return "gormoutbox/pool" }

func (plugin) Initialize(db *gorm.DB) error { return Install(db) }

// wrap returns what stands for p from now on, and whether that is another
// value. Where p is a cache of statements, the wrapper goes under it: into
// another front of the same cache, because p may be in use.
func wrap(db *gorm.DB, p gorm.ConnPool) (_ gorm.ConnPool, changed bool) {
	switch p := p.(type) {
	case *pool, gorm.TxCommitter:
		return p, false
	case *gorm.PreparedStmtDB:
		wrapped, changed := wrap(db, p.ConnPool)
		if !changed {
			return p, false
		}
		return &gorm.PreparedStmtDB{Stmts: p.Stmts, Mux: p.Mux, ConnPool: wrapped}, true
	default:
		return newPool(db, p), true
	}
}

// resolver is the name of dbresolver's callbacks, which choose a pool for the
// statement.
const resolver = "gorm:db_resolver"

// wrapResolved sees to it that what dbresolver chooses is wrapped. It knows the
// pools that it had before Install by their bare form. Its callback of queries
// is also what db.Clauses(dbresolver.Write) runs before a Begin; the others
// come before the transaction that GORM begins around a statement.
func wrapResolved(db *gorm.DB) error {
	callbacks := db.Callback()
	return errors.Join(
		wrapCallback(callbacks.Create()),
		wrapCallback(callbacks.Query()),
		wrapCallback(callbacks.Update()),
		wrapCallback(callbacks.Delete()),
	)
}

// wrapCallback has type parameters because GORM's types have no names outside.
func wrapCallback[C replacer](callbacks processor[C]) error {
	resolve := callbacks.Get(resolver)
	if resolve == nil {
		return nil
	}
	// A replacement does not inherit the place of what it replaces.
	return callbacks.Before("*").Replace(resolver, func(db *gorm.DB) {
		resolve(db)
		if wrapped, changed := wrap(db, db.Statement.ConnPool); changed {
			db.Statement.ConnPool = wrapped
		}
	})
}

type processor[C replacer] interface {
	Get(name string) func(*gorm.DB)
	Before(name string) C
}

type replacer interface {
	Replace(name string, fn func(*gorm.DB)) error
}

// Primary returns the connection pool behind a handle, in a transaction or
// not. With dbresolver that is the pool of the database which gorm.Open was
// given, where db.Transaction and db.Begin run.
func Primary(db *gorm.DB) (*sql.DB, error) {
	if db == nil || db.Config == nil {
		return nil, errors.New("gormoutbox: the handle is nil or was not opened")
	}
	p, err := database(db.Config.ConnPool)
	if err != nil {
		return nil, fmt.Errorf("gormoutbox: find the *sql.DB behind a %T: %w", db.Config.ConnPool, err)
	}
	return p, nil
}

// database finds the *sql.DB behind a pool or a transaction like GORM does.
func database(p gorm.ConnPool) (*sql.DB, error) {
	return (&gorm.DB{Config: &gorm.Config{ConnPool: p}}).DB()
}
