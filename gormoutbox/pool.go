package gormoutbox

import (
	"context"
	"database/sql"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

// pool wraps a connection pool, so that the transactions it begins know their
// commit. Statements outside transactions pass through.
type pool struct {
	gorm.ConnPool
	logger logger.Interface // told of functions that panic
	// exactNames says that quoted names of savepoints are told apart by case.
	exactNames bool
	// staysOpen says that a transaction goes on after a COMMIT that failed.
	staysOpen bool
}

var (
	_ gorm.ConnPoolBeginner = (*pool)(nil)
	_ gorm.GetDBConnector   = (*pool)(nil)
)

func newPool(db *gorm.DB, inner gorm.ConnPool) *pool {
	return &pool{
		ConnPool:   inner,
		logger:     db.Logger,
		exactNames: db.Dialector.Name() == "postgres",
		staysOpen:  db.Dialector.Name() == "sqlite",
	}
}

// BeginTx begins a transaction. After an error the transaction is a typed nil,
// as with an *sql.DB, so that GORM's Rollback of it does nothing.
func (p *pool) BeginTx(ctx context.Context, opts *sql.TxOptions) (gorm.ConnPool, error) {
	conn, err := p.begin(ctx, opts)
	if err != nil {
		return (*transaction)(nil), err
	}
	tx, ok := conn.(gorm.Tx)
	if !ok {
		// Another wrapper's, which GORM can do less with. It would claim to do
		// more if it were wrapped again; From refuses it.
		return conn, nil
	}
	return &transaction{Tx: tx, pool: p, ctx: ctx}, nil
}

// begin chooses like gorm.DB.Begin.
func (p *pool) begin(ctx context.Context, opts *sql.TxOptions) (gorm.ConnPool, error) {
	switch beginner := p.ConnPool.(type) {
	case gorm.TxBeginner:
		return beginner.BeginTx(ctx, opts)
	case gorm.ConnPoolBeginner:
		return beginner.BeginTx(ctx, opts)
	default:
		return nil, gorm.ErrInvalidTransaction
	}
}

// GetDBConn is how gorm.DB.DB finds the *sql.DB.
func (p *pool) GetDBConn() (*sql.DB, error) { return database(p.ConnPool) }

// Ping is what health checks look for in a pool, as GORM does when it opens
// one.
func (p *pool) Ping() error {
	db, err := p.GetDBConn()
	if err != nil {
		return err
	}
	return db.PingContext(context.Background())
}

// The limits of an *sql.DB, which dbresolver sets on the pools it was given.

func (p *pool) SetMaxOpenConns(n int) { p.limit(func(db *sql.DB) { db.SetMaxOpenConns(n) }) }

func (p *pool) SetMaxIdleConns(n int) { p.limit(func(db *sql.DB) { db.SetMaxIdleConns(n) }) }

func (p *pool) SetConnMaxLifetime(d time.Duration) {
	p.limit(func(db *sql.DB) { db.SetConnMaxLifetime(d) })
}

func (p *pool) SetConnMaxIdleTime(d time.Duration) {
	p.limit(func(db *sql.DB) { db.SetConnMaxIdleTime(d) })
}

func (p *pool) limit(set func(*sql.DB)) {
	if db, err := p.GetDBConn(); err == nil {
		set(db)
	}
}
